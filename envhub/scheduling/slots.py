"""Decides which episodes run when, and how a group ends: a pure state machine.

Events are method calls that return actions; time is passed in (seconds of any monotonic clock) and
nothing here waits or sends. A job is one ticket's group. Its episodes start as slots become free,
in the order of the jobs; a job larger than the hub runs in waves. Every accepted job ends in
exactly one of ``FinishGroup``, ``CloseTicket``, ``HandBack`` and ``AbandonTicket``. A job that may
have killed other hubs is held until it is judged, and then begins only while the hub is idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from broker.contract.pass_rate import never_within
from broker.contract.staleness import is_late
from broker.contract.streams import MAX_DELIVERIES
from broker.contract.wire import ClosedReason
from envhub.scheduling.line import GroupJob, GroupQueue

FailureKind = Literal["env", "timeout", "generate", "machine", "fatal", "large"]

# Why a group that cannot reach its size is closed. If generation failed, no process can be started,
# or nothing shows that the ticket is to blame, it is handed back instead, so that another hub can
# try.
CLOSED_FOR: dict[FailureKind, ClosedReason] = {
    "env": "env_error",
    "timeout": "timeout",
    "fatal": "env_error",
    "large": "too_large",
}
# another attempt would end the same way
HOPELESS: frozenset[FailureKind] = frozenset(("fatal", "large"))
# the machine may be to blame
OF_THE_HOST: frozenset[FailureKind] = frozenset(("env", "machine", "fatal", "timeout"))
# so that another hub takes the ticket, not this one again
HAND_BACK_DELAY_S = 1.0
# a group waits for its last episodes when at most one in this many is open
STRAGGLERS = 4


@dataclass(frozen=True)
class StartEpisode:
    """Start an episode; ``attempt`` counts from 0."""

    key: str
    episode: int
    attempt: int


@dataclass(frozen=True)
class AbortEpisode:
    """Stop a running episode; its slot is free already."""

    key: str
    episode: int


@dataclass(frozen=True)
class FinishGroup:
    """The group is complete and consists of these episodes."""

    key: str
    episodes: tuple[int, ...]


@dataclass(frozen=True)
class CloseTicket:
    """The ticket ends without a group."""

    key: str
    reason: ClosedReason
    detail: str


@dataclass(frozen=True)
class HandBack:
    """The ticket is left to another hub."""

    key: str
    delay_s: float
    detail: str


@dataclass(frozen=True)
class AbandonTicket:
    """The ticket is no longer this hub's, so no record is stored for it."""

    key: str


@dataclass(frozen=True)
class HurryEpisode:
    """A running episode is among the last that its group waits for."""

    key: str
    episode: int


Action = (
    HurryEpisode
    | StartEpisode
    | AbortEpisode
    | FinishGroup
    | CloseTicket
    | HandBack
    | AbandonTicket
)


@dataclass
class _Group:
    job: GroupJob
    began: float
    until: float
    waiting: int
    running: dict[int, int] = field(default_factory=dict)  # episode -> attempt
    finished: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # beyond their retries
    oldest_version: int | None = None
    is_hurried: bool = False  # only its last episodes are open
    solved: dict[int, bool] = field(default_factory=dict)  # episodes whose success is final


class EpisodeSlots:
    """n slots and the groups in them.

    Args:
        n: episodes that may run at once.
        max_retries: how often one episode starts again after a failure.
    """

    def __init__(self, n: int, max_retries: int) -> None:
        self.n = n
        self.max_retries = max_retries
        self.draining = False
        self.version = -1  # newest policy version seen
        self._line = GroupQueue()
        self._groups: dict[str, _Group] = {}
        # episodes that wait for a slot: key, episode, attempt
        self._queue: deque[tuple[str, int, int]] = deque()
        self.running = 0  # episodes in a slot
        self._reserved = 0

    @property
    def waiting(self) -> int:
        """Episodes that wait for a slot."""
        return len(self._queue)

    @property
    def free(self) -> int:
        """Slots not in use, waited for or reserved; negative if too many episodes wait."""
        num_queued = sum(self._need(job.group_size) for job in self._line.jobs())
        return self.n - self.running - len(self._queue) - self._reserved - num_queued

    @property
    def jobs(self) -> list[str]:
        """Keys of the groups in hand: those that have begun, oldest first, then waiting ones."""
        return [*self._groups, *(job.key for job in self._line.jobs())]

    @property
    def begun(self) -> list[str]:
        """Keys of the groups that have begun, oldest first."""
        return list(self._groups)

    def describe_retry(self, key: str, episode: int, actions: list[Action]) -> str:
        """Return what ``failed`` led to, for the log; empty if it ended the ticket."""
        if any(isinstance(action, HandBack) and action.key == key for action in actions):
            return "its ticket goes back to the queue and will be played again"
        if (group := self._groups.get(key)) is None:
            return ""
        is_waiting = any(entry[:2] == (key, episode) for entry in self._queue)
        if not is_waiting and episode not in group.running:
            return ""
        return "the episode starts again"

    def reserve(self, group_size: int, limit: int) -> int:
        """Reserve room for up to ``limit`` groups; return how many, to be offered or released."""
        if self.draining or self._line:
            return 0
        need = self._need(group_size)
        count = max(0, min(limit, self.free // need))
        self._reserved += count * need
        return count

    def release(self, group_size: int, count: int) -> None:
        """Release room that ``reserve`` kept."""
        self._reserved -= count * self._need(group_size)

    def _need(self, group_size: int) -> int:
        # a group larger than the hub needs all of it
        return min(group_size, self.n)

    def offer(self, job: GroupJob, now: float) -> list[Action]:
        """Take a ticket. Its reserved room, if any, must have been released just before."""
        return self._accept(job, alone=False) or self._enter(now)

    def hold(self, job: GroupJob) -> list[Action]:
        """Take a ticket that waits for ``admit`` or ``close_poisonous`` before it begins."""
        return self._accept(job, alone=None)

    def admit(self, key: str, now: float, *, alone: bool) -> list[Action]:
        """Let a held job begin; with ``alone`` only while the hub is idle."""
        self._line.judge(key, alone=alone)
        return self._enter(now)

    def close_poisonous(self, key: str, detail: str) -> list[Action]:
        """Close a held job as poisonous."""
        if key not in self._line:
            return []
        return self._stop(key, CloseTicket(key, "poisonous", detail))

    def _accept(self, job: GroupJob, *, alone: bool | None) -> list[Action]:
        if job.key in self._groups or job.key in self._line:
            # redelivered while it still runs here
            return []
        if job.num_delivered >= MAX_DELIVERIES:
            detail = f"delivered {job.num_delivered} times and never finished"
            return [CloseTicket(job.key, "too_many_deliveries", detail)]
        if self.draining:
            return [HandBack(job.key, 0.0, "draining")]
        self._line.put(job, alone=alone)
        return []

    def _enter(self, now: float, *, idle: bool = False) -> list[Action]:
        """Begin the groups whose turn it is."""
        while job := self._line.next(idle=idle and not self._groups):
            self._groups[job.key] = _Group(job, now, now + job.deadline_s, job.group_size)
            self._queue.extend((job.key, episode, 0) for episode in range(job.group_size))
        return self._fill()

    def finished(self, key: str, episode: int) -> list[Action]:
        """Note that an episode finished."""
        if (group := self._leave(key, episode)) is None:
            return self._fill()
        group.finished.add(episode)
        return self._settle(group) or self._hurry(group) + self._fill()

    def judged(self, key: str, episode: int, *, solved: bool) -> list[Action]:
        """Note whether an episode succeeded; close its group once it is sure to be filtered."""
        group = self._groups.get(key)
        if group is None or not group.job.pass_rate or episode not in group.finished:
            return []
        job = group.job
        sampled = range(group.job.group_size - group.job.num_greedy)
        if episode not in sampled:
            return []
        group.solved[episode] = solved
        num_open = sum(index not in group.solved and index not in group.failed for index in sampled)
        num_solved = sum(group.solved.values())
        num_judged = len(group.solved)
        low, high = job.pass_rate
        if not never_within(num_solved, num_judged, num_open, low, high):
            return []
        detail = (
            f"{num_solved} of {num_judged} episodes succeeded, {num_open} open; "
            f"pass_rate {low:g} to {high:g}"
        )
        return self._end(group, CloseTicket(key, "filtered", detail))

    def failed(
        self, key: str, episode: int, kind: FailureKind, detail: str, *, own: bool = True
    ) -> list[Action]:
        """Start a failed episode again, unless its retries are used up or ``kind`` is hopeless.

        Args:
            own: whether the ticket is to blame, as it always is for hopeless kinds; if not, another
                hub should try.
        """
        begun_group = self._groups.get(key)
        attempt = 0 if begun_group is None else begun_group.running.get(episode, 0)
        if (group := self._leave(key, episode)) is None:
            return self._fill()
        if kind not in HOPELESS and attempt < self.max_retries:
            # in front, as its group already waits for it
            self._queue.appendleft((key, episode, attempt + 1))
            group.waiting += 1
            return self._fill()
        group.failed.add(episode)
        if group.job.group_size - len(group.failed) < group.job.min_group_size:
            detail = f"episode {episode}, attempt {attempt + 1}: {detail}"
            reason = CLOSED_FOR.get(kind)
            if reason is None or not (own or kind in HOPELESS):
                return self._end(group, HandBack(key, HAND_BACK_DELAY_S, detail))
            return self._end(group, CloseTicket(key, reason, detail))
        return self._settle(group) or self._hurry(group) + self._fill()

    def sampled(self, key: str, oldest_version: int) -> list[Action]:
        """Note that tokens were sampled for a group, the oldest by policy ``oldest_version``."""
        if (group := self._groups.get(key)) is None:
            return []
        if group.oldest_version is None or oldest_version < group.oldest_version:
            group.oldest_version = oldest_version
        return self._close_if_late(group)

    def advanced(self, version: int) -> list[Action]:
        """Note a new version of the learner: close groups whose oldest token is now too old."""
        if version <= self.version:
            return []
        self.version = version
        return [
            action for group in list(self._groups.values()) for action in self._close_if_late(group)
        ]

    def tick(
        self,
        now: float,
        *,
        idle: bool = True,
        left_s: Callable[[str, int], float] = lambda _key, _episode: 0.0,
    ) -> list[Action]:
        """End groups whose deadline has passed, and begin the next ones.

        Args:
            idle: nothing that this hub ended is still being stored, so that a suspect group may
                begin.
            left_s: returns for how long a running episode is still expected to run, 0 unknown.
        """
        actions: list[Action] = []
        # lists, as ending a group changes the dict
        for group in [group for group in self._groups.values() if now >= group.until]:
            job = group.job
            count = len(group.finished)
            if count >= job.min_group_size:
                actions += self._finish(group)
                continue
            detail = f"{count} of at least {job.min_group_size} episodes after {job.deadline_s:g} s"
            actions += self._end(group, CloseTicket(job.key, "deadline", detail))
        for group in [
            group for group in self._groups.values() if self._waits_in_vain(group, now, left_s)
        ]:
            actions += self._finish(group)
        return actions + self._enter(now, idle=idle)

    def _waits_in_vain(
        self, group: _Group, now: float, left_s: Callable[[str, int], float]
    ) -> bool:
        """Return whether a group has enough episodes, and all others would take far too long."""
        job = group.job
        if (
            job.straggler_factor is None
            or group.waiting
            or len(group.finished) < job.min_group_size
        ):
            return False
        limit_s = job.straggler_factor * (now - group.began)
        return all(left_s(job.key, episode) > limit_s for episode in group.running)

    def _hurry(self, group: _Group) -> list[Action]:
        """Start a group's last episodes before those of others, as it counts only as a whole."""
        job = group.job
        if group.is_hurried or len(group.running) + group.waiting > job.group_size // STRAGGLERS:
            return []
        group.is_hurried = True
        if group.waiting:
            # the sort is stable, so all others keep their order
            self._queue = deque(sorted(self._queue, key=lambda entry: entry[0] != job.key))
        return [HurryEpisode(job.key, episode) for episode in group.running]

    def drain(self) -> None:
        """Take no more tickets; finish those in hand."""
        self.draining = True

    def expire(self) -> list[Action]:
        """Hand back every ticket in hand, because the drain took too long."""
        self.draining = True
        return self.hand_back(self.jobs, 0.0, "draining")

    def hand_back(self, keys: Iterable[str], delay_s: float, detail: str) -> list[Action]:
        """Give up groups in hand; another hub may take their tickets after ``delay_s``."""
        ends = [
            action for key in keys for action in self._stop(key, HandBack(key, delay_s, detail))
        ]
        return ends + self._fill()

    def abandon(self, keys: Iterable[str]) -> list[Action]:
        """Give up groups whose tickets others may hold by now."""
        ends = [action for key in keys for action in self._stop(key, AbandonTicket(key))]
        return ends + self._fill()

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while self._queue and self.running < self.n:
            key, episode, attempt = self._queue.popleft()
            group = self._groups[key]
            group.waiting -= 1
            group.running[episode] = attempt
            self.running += 1
            actions.append(StartEpisode(key, episode, attempt))
            if group.is_hurried:
                actions.append(HurryEpisode(key, episode))
        return actions

    def _leave(self, key: str, episode: int) -> _Group | None:
        group = self._groups.get(key)
        if group is None or group.running.pop(episode, None) is None:
            # its group has ended, or it never started
            return None
        self.running -= 1
        return group

    def _settle(self, group: _Group) -> list[Action]:
        """Finish the group if it is complete, or has enough episodes and none is left."""
        job = group.job
        count = len(group.finished)
        is_open = group.running or group.waiting or count < job.min_group_size
        if count < job.group_size - job.num_redundant and is_open:
            return []
        return self._finish(group)

    def _finish(self, group: _Group) -> list[Action]:
        return self._end(group, FinishGroup(group.job.key, tuple(sorted(group.finished))))

    def _close_if_late(self, group: _Group) -> list[Action]:
        max_staleness = group.job.max_staleness
        oldest = group.oldest_version
        if (
            max_staleness is None
            or oldest is None
            or not is_late(oldest, self.version, max_staleness)
        ):
            return []
        detail = (
            f"oldest token of version {oldest}, learner at version {self.version}, "
            f"max_staleness {max_staleness}"
        )
        return self._end(group, CloseTicket(group.job.key, "late", detail))

    def _end(self, group: _Group, ending: Action) -> list[Action]:
        return self._stop(group.job.key, ending) + self._fill()

    def _stop(self, key: str, ending: Action) -> list[Action]:
        self._line.leave(key)
        if (group := self._groups.pop(key, None)) is None:
            # it had not begun
            return [ending]
        if group.waiting:
            self._queue = deque(entry for entry in self._queue if entry[0] != key)
        self.running -= len(group.running)
        return [*(AbortEpisode(key, episode) for episode in group.running), ending]
