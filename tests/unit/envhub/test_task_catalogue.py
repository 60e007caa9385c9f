"""Tasks that the learner chooses come back, with other seeds for sampling."""

from __future__ import annotations

from typing import Any

import msgspec

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.settings.runspec import check_settings
from envhub.domain import Domain, load_domains
from envhub.task_catalogue import KEY_BYTES, chosen_tasks
from envhub.tickets.assignment import assignment, task


def settings_of(**domain: Any) -> Any:
    lake = {"env": "frozenlake", **domain}
    return check_settings({"domains": {"lake": lake}, "eval": {"every_steps": 0}})


def seeds_of(domain: Domain, number: int) -> tuple[int, ...]:
    ticket = msgspec.structs.replace(EXAMPLES[wire.Ticket], number=number, domain="lake")
    return task(assignment(ticket), domain, 1, "name").sampling_seeds


def test_tasks_of_a_curriculum() -> None:
    tasks = chosen_tasks(settings_of(curriculum={"tasks": 7}))["lake"]
    assert tasks.parts == [(7, 1.0)]
    assert len(tasks.keys) == 7 * KEY_BYTES
    assert chosen_tasks(settings_of()) == {}


def test_returning_task_has_other_sampling_seeds() -> None:
    domain = load_domains(settings_of(curriculum={"tasks": 7}))["lake"]
    assert seeds_of(domain, 3) != seeds_of(domain, 4)
    assert seeds_of(domain, 3) == seeds_of(domain, 3)
    plain = load_domains(settings_of())["lake"]
    assert seeds_of(plain, 3) == seeds_of(plain, 4)
