"""Decides when a run that only fails must end. Pure, except for ``watch_hubs``.

Four rules, of which any one ends the run:

1. The first ``give_up_after`` groups of this learner all failed.
2. In the last ``WINDOW`` groups of each domain the share of failures, weighted by the domains'
   weights, reaches ``max_share``. Shares are per domain because groups that fail at once come back
   more often than trained ones.
3. For ``give_up_after_s`` seconds every hub of a domain or a reward pool has reported that it is
   broken there, and no group was trained. A domain that has worked under this learner gets
   ``WORKED_TIMES`` as long.
4. ``MAX_SKIPPED`` steps in a row made no update, because their gradients were not finite. (One or
   two may pass: other groups have other gradients.)

Only records appended while this learner runs count, so a run that ended this way resumes with a
count of zero.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from broker.contract import wire
from broker.runtime.presence import Roster
from broker.settings.config import DomainSection
from learner.config import FailuresSection

log = logging.getLogger(__name__)

# closed by the learner's pace, by --rebase, by a filter, or handed back
NOT_FAILURES: Final = frozenset({"late", "lost", "filtered", "aborted"})
LEAST_WINDOW: Final = 32
# Hubs that have worked are rather restarted or updated than wrongly configured.
WORKED_TIMES: Final = 12
MAX_SKIPPED: Final = 5
LOOK_EVERY_S: Final = 1.0
# Longer details of a failure are cut.
MAX_CHARS: Final = 400
# (file.py:88 in fn), see broker.system.fault
PLACE: Final = re.compile(r"\([^()\s]+:\d+ in [^()]+\)")


class FailureMonitor:
    """Detector of runs that only fail, by the outcomes of groups and steps and hubs' reports.

    Args:
        settings: the section ``failures``.
        groups_per_step: of the run.
        domains: of the run.
    """

    def __init__(
        self, settings: FailuresSection, groups_per_step: int, domains: Mapping[str, DomainSection]
    ) -> None:
        limit = settings.give_up_after
        self._after = 4 * groups_per_step if limit is None else limit
        self._after_s = settings.give_up_after_s
        self._max_share = settings.max_share
        window = max(4 * groups_per_step, LEAST_WINDOW)
        self._weights = {name: domain.weight for name, domain in domains.items()}
        # whether each group failed
        self._outcomes: dict[str, deque[bool]] = {name: deque(maxlen=window) for name in domains}
        self._window = window
        self._needs = {
            name: [
                f"domain {name}",
                *dict.fromkeys(f"pool {reward.pool}" for reward in domain.rewards),
            ]
            for name, domain in domains.items()
        }
        self._num_failed = 0
        self._num_worked = 0
        self._kinds: Counter[str] = Counter()
        self._last_messages: dict[str, str] = {}  # kind of failure -> its latest message
        self._worked: set[str] = set()  # domains and pools
        # domain or pool -> since when all its hubs are broken, and why
        self._broken: dict[str, tuple[float, str]] = {}
        self._num_worked_before = 0
        self._num_skipped = 0  # steps in a row
        self.verdict = ""  # one line, why the run must end; empty if it need not

    def worked(self, domain: str) -> None:
        """Count a scored group of this domain, whether it is trained or filtered."""
        self._num_worked += 1
        self._worked.update(self._needs.get(domain, ()))
        if domain in self._outcomes:
            self._outcomes[domain].append(False)

    def failed(self, domain: str, reason: str, detail: str) -> str:
        """Count a failed group of this domain, and return the verdict.

        Args:
            domain: empty if unknown.
            reason: why its ticket was closed.
            detail: one line, with the place in the user's code if there is one.
        """
        if reason in NOT_FAILURES:
            return self.verdict
        self._num_failed += 1
        place = PLACE.search(detail)
        kind = f"{reason} {place.group() if place else re.sub('[0-9]+', '#', detail)}"
        self._kinds[kind] += 1
        self._last_messages[kind] = f"{reason}: {detail[:MAX_CHARS]}"
        if domain in self._outcomes:
            self._outcomes[domain].append(True)
        if self._after and not self.verdict:
            self._check_failures()
        return self.verdict

    def stepped(self, *, is_skipped: bool, problem: str) -> str:
        """Take the end of a step, and return the verdict.

        Args:
            is_skipped: whether it made no update.
            problem: the tensor by which a gradient was not finite, empty if it is not known.
        """
        self._num_skipped = self._num_skipped + 1 if is_skipped else 0
        if problem and self._num_skipped <= 1:
            log.warning("an update was skipped: %s", problem)
        if self._num_skipped >= MAX_SKIPPED and self._after and not self.verdict:
            reason = problem or "the tensor is not known"
            self.verdict = (
                f"{self._num_skipped} steps in a row made no update because their gradients were "
                f"not finite: {reason}; lower train.lr or set model.dtype=float32, and start the "
                "run again, which resumes it (failures.give_up_after=0 continues regardless)"
            )
        return self.verdict

    def look(self, hubs: Iterable[wire.Presence], now: float) -> str:
        """Check the hubs' current reports, and return the verdict.

        Args:
            now: seconds during which hubs could report; the clock stops while the broker is away.
        """
        hubs = list(hubs)
        if self._num_worked > self._num_worked_before:
            self._broken.clear()
            self._num_worked_before = self._num_worked
        for key in dict.fromkeys(key for needs in self._needs.values() for key in needs):
            problem = _find_problem(key, hubs)
            if not problem:
                self._broken.pop(key, None)
                continue
            since, _ = self._broken.get(key, (now, ""))
            self._broken[key] = since, problem
            limit_s = self._after_s * (WORKED_TIMES if key in self._worked else 1)
            if self._after_s and now - since >= limit_s and not self.verdict:
                self.verdict = (
                    f"for {limit_s:g} s every hub of {key} was broken and no group was trained: "
                    f"{problem[:MAX_CHARS]}; fix that and start the run again, which resumes it "
                    "(failures.give_up_after_s=0 waits without end)"
                )
        return self.verdict

    def pause(self) -> None:
        """Ignore the hubs' reports while the run is paused."""
        self._broken.clear()

    def _check_failures(self) -> None:
        if not self._num_worked and self._num_failed >= self._after:
            summary = f"all of the first {self._num_failed} groups failed"
        elif self._share() >= self._max_share - 1e-9:
            summary = f"{self._share():.0%} of the last {self._window} groups of each domain failed"
        else:
            return
        kind, count = self._kinds.most_common(1)[0]
        self.verdict = (
            f"{summary}, most often ({count} of {self._num_failed}) by "
            f"{self._last_messages[kind]}; fix that and start the run again, which resumes it "
            "(failures.give_up_after=0 continues regardless)"
        )

    def _share(self) -> float:
        """Return the share of failed groups; those missing from a window count as trained."""
        shares = (
            self._weights[name] * sum(outcomes) / self._window
            for name, outcomes in self._outcomes.items()
        )
        return math.fsum(shares) / math.fsum(self._weights.values())


def _find_problem(key: str, hubs: Iterable[wire.Presence]) -> str:
    """Return a hub's report of a broken domain or pool; empty if any hub serves it."""
    noun, _, name = key.partition(" ")
    role = "envhub" if noun == "domain" else "rewardhub"
    problem = ""
    for hub in hubs:
        if hub.role != role:
            continue
        if name in hub.serves:
            return ""
        if f"; {key}: " in f"; {hub.problem}":
            problem = f"{hub.id}: {hub.problem}"
    return problem


async def watch_hubs(
    failure_monitor: FailureMonitor,
    roster: Roster,
    is_paused: Callable[[], bool],
    stop_run: Callable[[str], None],
) -> None:
    """Check once a second until there is a verdict, and pass it to ``end``."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if is_paused():
            failure_monitor.pause()
        elif verdict := failure_monitor.look(
            [*roster.alive("envhub"), *roster.alive("rewardhub")], roster.clock
        ):
            stop_run(verdict)
            return
