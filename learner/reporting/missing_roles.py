"""Reports missing processes: tickets are open, and no hub or server has joined to take them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from broker.contract.wire import ACTOR
from broker.runtime.presence import Roster
from broker.settings.config import DomainSection
from broker.settings.schema.policies import PolicySection
from broker.settings.schema.teaching import TeacherSection
from broker.system.reminders import Reminders

log = logging.getLogger(__name__)

# Processes that are started together with the learner join within this.
JOIN_TIMEOUT_S: Final = 10.0
LOOK_EVERY_S: Final = 1.0
COMMANDS: Final = {"envhub": "envhub", "rollout": "rollout-server", "rewardhub": "rewardhub"}
NAMES: Final = {"envhub": "envhub", "rollout": "rollout server", "rewardhub": "rewardhub"}
# before the policy of a server of its own, which is then a role
TEACHER: Final = "teacher "
PLAYER: Final = "policy "


class MissingRoles:
    """Detector of missing roles, which are reported again at growing intervals. Pure.

    Args:
        run: named in the suggested command.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._missing_since: dict[str, float] = {}
        self._reminders: dict[str, Reminders] = {}
        self.missing: list[str] = []  # roles reported as missing

    def look(self, present: dict[str, bool], has_work: bool, now: float) -> list[str]:
        """Return the lines to log at ``now``.

        Args:
            present: whether a process of each role that the run needs is alive.
            has_work: whether tickets are open.
        """
        lines = []
        for role, is_present in present.items():
            if is_present:
                self._missing_since.pop(role, None)
                if role in self.missing:
                    self.missing.remove(role)
                    self._reminders.pop(role)
                    lines.append(f"{_name_role(role)} has joined")
            elif has_work and now - self._missing_since.setdefault(role, now) >= JOIN_TIMEOUT_S:
                if role not in self.missing:
                    self.missing.append(role)
                    self._reminders[role] = Reminders()
                if not self._reminders[role].due(now):
                    continue
                command = f"{_start_command(role)} --run {self._run}"
                lines.append(
                    f"waiting: no {_name_role(role)} has joined; start one with `{command}`"
                )
        return lines


def _name_role(role: str) -> str:
    return NAMES.get(role, f"rollout server of {role}")


def _start_command(role: str) -> str:
    if role in COMMANDS:
        return COMMANDS[role]
    return f"{COMMANDS['rollout']} --policy {_served_policy(role)}"


def _served_policy(role: str) -> str:
    return role.removeprefix(TEACHER).removeprefix(PLAYER)


def required_roles(
    domains: Mapping[str, DomainSection],
    teachers: Mapping[str, TeacherSection],
    players: Mapping[str, PolicySection],
) -> list[str]:
    """Return the roles that a run needs in addition to the learner."""
    roles = [
        role
        for role in COMMANDS
        if role != "rewardhub" or any(domain.rewards for domain in domains.values())
    ]
    policies = {teacher.policy or name for name, teacher in teachers.items()} - {ACTOR}
    roles += [f"{TEACHER}{policy}" for policy in sorted(policies)]
    served = [name for name, player in players.items() if player.model_path is not None]
    return [*roles, *(f"{PLAYER}{policy}" for policy in sorted(served))]


def _present_roles(roster: Roster, needed: Sequence[str]) -> dict[str, bool]:
    policies = {server.policy for server in roster.alive("rollout")}
    present = {}
    for role in needed:
        if role == "rollout":
            present[role] = ACTOR in policies
        elif role.startswith((TEACHER, PLAYER)):
            present[role] = _served_policy(role) in policies
        else:
            present[role] = bool(roster.alive(role))
    return present


async def watch_missing_roles(
    run: str,
    roster: Roster,
    needed: Sequence[str],
    has_work: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Check once a second; ``say`` receives the newest missing role, or an empty text."""
    detector = MissingRoles(run)
    while True:
        present = _present_roles(roster, needed)
        for line in detector.look(present, has_work(), time.monotonic()):
            is_waiting = line.startswith("waiting")
            log.log(logging.WARNING if is_waiting else logging.INFO, "%s", line)
            say(line if detector.missing and is_waiting else "")
        await asyncio.sleep(LOOK_EVERY_S)
