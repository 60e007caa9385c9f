"""The section ``envhub``: how a hub runs its environments; and what can be said about the domains before anything
starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pydantic import PositiveFloat, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import Section

if TYPE_CHECKING:
    from envhub.domain import Domain

EVAL_TASKS: Final = 256  # per domain, where `eval.tasks` is null and every domain has as many


class EnvhubSection(Section):
    """Settings of an environment hub; the domains stand in a section of their own."""

    n: PositiveInt = 64  # environments running at once
    step_timeout_s: PositiveFloat = 30.0  # one reset or step
    episode_timeout_s: PositiveFloat | None = None  # null: derived, see broker.settings.timeouts
    generate_timeout_s: PositiveFloat | None = None  # one turn, retries included; null: derived from the next one
    min_tokens_per_s: PositiveFloat = 10.0  # that a loaded server still samples for one request
    max_retries: PositiveInt = 3  # of one turn on other servers, and of one episode after an error
    worker_memory_mib: PositiveInt | None = 2048  # of one environment in a worker process; None: no limit
    max_hung_threads: PositiveInt = 256  # a hub that has lost this many threads in environments exits
    # tickets of a domain that fail in a row (or as many as are played at once, at least 2) before no more are taken
    # until a trial goes well
    broken_after: PositiveInt = 5
    drain_timeout_s: PositiveFloat = 30.0


def check(config: dict[str, Any]) -> None:
    """Refuse domains that cannot run: unknown environment, missing or malformed data, numbers that contradict each
    other.

    Raises:
        ConfigError: names the key, its value and what is allowed.
        DataError: a malformed row of a data file.
    """
    from envhub.domain import load_domains

    domains = load_domains(config)
    for domain in domains.values():
        _check_numbers(domain, config)
        domain.check()
    if (section := config.get("eval") or {}).get("every_steps"):
        section["tasks"] = num_eval_tasks(config)
    _check_demonstrations(domains, config.get("warm_start") or {})


def data_digests(config: dict[str, Any]) -> dict[str, str]:
    """Content digest of every data file that the hubs of this run read; for ``RunSpec.data_digests``.

    Raises:
        UserError: a file cannot be read.
    """
    from broker.settings.runspec import digest_file
    from envhub.domain import load_domains

    files = {file for domain in load_domains(config).values() for file in domain.environment.data_files(domain.args)}
    return {file: digest_file(file) for file in sorted(files)}


def num_eval_tasks(config: dict[str, Any]) -> int:
    """Return how many tasks of each domain an evaluation measures: ``eval.tasks``, by default 256 or as many as every
    domain has.

    No task is measured twice, since it would count as another one.

    Raises:
        ConfigError: a domain has no held-out tasks, or fewer than ``eval.tasks``.
        UserError: as ``check``.
    """
    from envhub.domain import load_domains

    wanted, least = config["eval"]["tasks"], EVAL_TASKS
    for name, domain in load_domains(config).items():
        there = domain.num_tasks("eval")
        if there is None:
            continue
        if not there:
            raise ConfigError(
                "eval.tasks",
                wanted or EVAL_TASKS,
                f"domain {name} has no held-out tasks; eval.every_steps=0 measures none",
            )
        if wanted is not None and wanted > there:
            raise ConfigError("eval.tasks", wanted, f"at most {there}, the held-out tasks of domain {name}")
        least = min(least, there)
    return least if wanted is None else int(wanted)


def _check_numbers(domain: Domain, config: dict[str, Any]) -> None:
    from envhub.envs.agent import AgentEnvironment, check_section

    section, key = domain.section, f"domains.{domain.name}"
    if section.min_group_size is not None and section.min_group_size > section.group_size:
        raise ConfigError(
            f"{key}.min_group_size", section.min_group_size, f"at most group_size, which is {section.group_size}"
        )
    if section.sampling.max_tokens >= section.max_context_tokens:
        raise ConfigError(
            f"{key}.sampling.max_tokens",
            section.sampling.max_tokens,
            f"less than max_context_tokens, which is {section.max_context_tokens}",
        )
    served = (config.get("rollout") or {}).get("max_context_tokens")
    if served is not None and section.max_context_tokens > served:
        raise ConfigError(
            f"{key}.max_context_tokens",
            section.max_context_tokens,
            f"at most rollout.max_context_tokens, which is {served}",
        )
    if issubclass(domain.environment, AgentEnvironment):
        check_section(domain.name, section, domain.args)
    if not domain.environment.has_reward and not section.rewards:
        raise ConfigError(
            f"{key}.rewards", [], f"environment {section.env} gives no reward of its own; name at least one reward"
        )


def _check_demonstrations(domains: dict[str, Domain], section: dict[str, Any]) -> None:
    if not section.get("steps") or section.get("data"):
        return
    from envhub.envs.base import can_demonstrate

    name = section.get("domain") or (next(iter(domains)) if len(domains) == 1 else "")
    if name not in domains:
        raise ConfigError("warm_start.domain", name, f"one of {', '.join(domains) or 'no domains'}")
    if not can_demonstrate(domains[name].environment):
        raise ConfigError(
            "warm_start.domain",
            name,
            f"environment {domains[name].section.env} has no solver; give warm_start.data instead",
        )
