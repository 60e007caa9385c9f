"""Simulates the flow of a run's groups event by event, deterministically, for ``rlearner advise``.

Tickets are issued as the ledger issues them: (version + 1 + max_staleness) * groups_per_step in
all. Hubs start groups as they have room, episodes alternate between the servers and their
environment, a finished group is scored, and the learner takes groups in the order of the log. While
it completes a step it reads no further record, so a filtered group is replaced only after that.
Servers, environments and rewards are stations whose customers slow each other down; the servers of
a run are one station, since requests go to the less loaded ones.

Large runs are simulated in proportion: a tenth of the groups, servers and hubs behaves like the
whole.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from broker.contract.staleness import due_step
from learner.credit.ticket_rules import due_horizon
from rlearner.advise.run_model import RunModel

# Of one simulation, about 0.05 s; advice takes dozens of simulations.
MAX_EVENTS: Final = 10_000
# Turns of an episode that are simulated; more are merged.
MAX_VISITS: Final = 3
# Steps that count, besides those until the run is steady.
MIN_STEPS: Final = 8
MAX_STEPS: Final = 48
# Groups in a step of a scaled-down run, at least.
MIN_GROUPS: Final = 4


@dataclass(frozen=True)
class Prediction:
    """What a simulated run reaches.

    Attributes:
        step_s: seconds of a step.
        samples_per_s: trained episodes per second.
        generate_s: of an episode on the servers, their queue included.
        busy: by station the share of its capacity that was in use.
    """

    step_s: float
    samples_per_s: float
    generate_s: float
    busy: dict[str, float]


class _Station:
    """Requests that share one resource.

    Each advances by 1 / (base + each * running / units) units of work a second. Work is counted by
    a clock of that speed, so a request ends when the clock reaches its mark.
    """

    __slots__ = (
        "_base",
        "_per_request",
        "_slots",
        "at",
        "busy",
        "clock",
        "due_at",
        "inside",
        "marks",
        "pace",
        "running",
        "waiting",
    )

    def __init__(self, base: float, per_request: float, units: float, slots: float) -> None:
        self._base = base
        self._per_request = per_request / units
        self._slots = slots
        self.running = 0
        self.at = self.clock = self.busy = self.inside = 0.0
        self.pace = base
        self.due_at = math.inf
        self.marks: list[tuple[float, int, _Episode]] = []  # heap of (mark, number, episode)
        # heap of (step it is for, number, work, episode)
        self.waiting: list[tuple[int, int, float, _Episode]] = []

    def _advance(self, now: float) -> None:
        elapsed = now - self.at
        if self.running and elapsed > 0:
            self.clock += elapsed / self.pace
            self.busy += elapsed * self.running
            self.inside += elapsed * (self.running + len(self.waiting))
        self.at = now

    def _settle(self) -> None:
        while self.waiting and self.running < self._slots:
            _, number, work, episode = heapq.heappop(self.waiting)
            if not episode.gone:
                self.running += 1
                episode.runs = True
                heapq.heappush(self.marks, (self.clock + work, number, episode))
        while self.marks and self.marks[0][2].gone:
            heapq.heappop(self.marks)
        self.pace = self._base + self._per_request * self.running
        self.due_at = math.inf
        if self.marks:
            self.due_at = self.at + max(0.0, self.marks[0][0] - self.clock) * self.pace

    def enter(self, now: float, work: float, number: int, episode: _Episode) -> None:
        self._advance(now)
        heapq.heappush(self.waiting, (episode.group.due, number, work, episode))
        self._settle()

    def leave(self) -> _Episode:
        """End the request that is due, and return its episode."""
        self._advance(self.due_at)
        mark, _, episode = heapq.heappop(self.marks)
        self.clock = max(self.clock, mark)
        self.running -= 1
        episode.runs = False
        self._settle()
        return episode

    def drop(self, now: float, episode: _Episode) -> None:
        """End the request of an episode that is gone, which may still wait."""
        self._advance(now)
        self.running -= episode.runs
        episode.runs = False
        self._settle()


class _Episode:
    __slots__ = ("env", "gone", "group", "place", "runs", "tokens", "visits")

    def __init__(self, group: _Group, tokens: float, env: float, visits: int) -> None:
        self.group = group
        self.tokens = tokens
        self.env = env
        self.visits = visits
        self.gone = self.runs = False
        self.place: _Station | None = None


class _Group:
    __slots__ = ("due", "episodes", "finished", "hub", "is_kept", "to_score")

    def __init__(self, hub: int, due: int, *, is_kept: bool) -> None:
        self.hub = hub
        self.due = due
        self.is_kept = is_kept
        self.finished = self.to_score = 0
        self.episodes: list[_Episode] = []


class _Run:
    """One simulation; ``tokens`` and ``env`` hold the work of each episode of each ticket, and
    ``luck`` a number for each ticket whose group is filtered if it is above the share of those
    kept.
    """

    def __init__(self, model: RunModel, steps: int, visits: int) -> None:
        self.model = model
        self.steps = steps
        self.visits = visits
        self.servers = _Station(
            model.token_s,
            model.token_each_s,
            units=model.servers,
            slots=max(1.0, model.servers * model.slots),
        )
        self.envs = _Station(
            1.0, model.env_each_s / max(model.env_s, 1e-12), units=model.hubs, slots=math.inf
        )
        self.rewards = _Station(
            1.0,
            model.score_each_s / max(model.score_s, 1e-12),
            units=model.reward_hubs,
            slots=model.reward_hubs * model.workers,
        )
        self.delays = _Station(1.0, 0.0, 1.0, math.inf)
        self.stations = (self.servers, self.envs, self.rewards, self.delays)
        if model.hubs >= 1:
            self.room = [model.envs] * round(model.hubs)
        else:  # a scaled-down run: a part of one hub
            self.room = [max(1, round(model.hubs * model.envs))]
        self.need = [min(model.group_size, room) for room in self.room]
        self.most = list(self.room)
        num_groups = (steps + model.max_staleness + 2) * model.groups_per_step
        self.tokens, self.env = _draw_work(model, num_groups)
        places = np.random.default_rng(2).permutation(num_groups)
        self.luck = ((places + 0.5) / num_groups).tolist()
        self.started = 0
        # Tickets that no hub has, by the last step that may train on them.
        self.tickets: deque[int] = deque()
        self.unplaced: Counter[int] = Counter()  # tickets that no step has taken, by the same
        self.queued: deque[tuple[_Group, _Episode]] = deque()
        self.number = 0
        self.now = 0.0
        self.version = 0
        self.taken = 0
        self.unread: deque[_Group] = deque()  # in the samples log
        self.queue: list[_Group] = []  # read, without a place in a step
        self.free_at = self.takes_at = self.worked = 0.0
        self.done_at = math.inf
        self.played = 0.0  # seconds of episodes in a slot
        self.playing = 0
        self.starved = 0.0  # seconds of slots that were empty because there was no ticket
        self.num_played = 0
        self.step_ends: list[float] = []

    def run(self) -> list[float]:
        """Return the time at which each step ended."""
        self._issue((self.model.max_staleness + 1) * self.model.groups_per_step)
        while self.version < self.steps:
            due_at, index = min(
                (station.due_at, index) for index, station in enumerate(self.stations)
            )
            now = min(due_at, self.done_at)
            if (self.unread or self.queue) and self.takes_at > self.now:
                now = min(now, self.takes_at)
            if now == math.inf:
                raise RuntimeError("a simulated run stands still")
            self._pass(now)
            if now == self.done_at:
                self._complete()
            elif now == due_at:
                self._advance_episode(index, self.stations[index].leave())
            self._take()
            self._start()
        return self.step_ends

    def _pass(self, now: float) -> None:
        elapsed = now - self.now
        self.played += elapsed * self.playing
        if not self.tickets:
            self.starved += elapsed * max(0, sum(self.room))
        self.now = now

    def _issue(self, count: int) -> None:
        due = due_step(self.version, self.model.max_staleness)
        self.tickets.extend([due] * count)
        self.unplaced[due] += count
        self._start()

    def _start(self) -> None:
        while self.tickets:
            hub = max(range(len(self.room)), key=self.room.__getitem__)
            if self.room[hub] < self.need[hub] or self._waits(hub):
                return
            index = self.started % len(self.tokens)
            self.started += 1
            is_kept = self.luck[index] < self.model.kept
            group = _Group(hub, self.tickets.popleft(), is_kept=is_kept)
            tokens = self.tokens[index]
            env = self.env[index]
            group.episodes = [
                _Episode(group, tokens[i] / self.visits, env[i] / self.visits, self.visits)
                for i in range(self.model.group_size)
            ]
            self._fill(group)

    def _waits(self, hub: int) -> bool:
        return any(group.hub == hub for group, _ in self.queued)

    def _fill(self, group: _Group) -> None:
        for episode in group.episodes:
            if self.room[group.hub] > 0:
                self._play(episode)
            else:
                self.queued.append((group, episode))

    def _play(self, episode: _Episode) -> None:
        self.room[episode.group.hub] -= 1
        self.playing += 1
        if self.model.delay_s:
            self._enter(self.delays, self.model.delay_s, episode)
        else:
            self._enter(self.servers, episode.tokens, episode)

    def _enter(self, station: _Station, work: float, episode: _Episode) -> None:
        self.number += 1
        episode.place = station
        station.enter(self.now, work, self.number, episode)

    def _advance_episode(self, index: int, episode: _Episode) -> None:
        if index == 0:
            if self.model.env_s:
                self._enter(self.envs, episode.env * self.model.env_s, episode)
            else:
                self._end_turn(episode)
        elif index == 1:
            self._end_turn(episode)
        elif index == 3:
            self._enter(self.servers, episode.tokens, episode)
        else:
            episode.place = None
            self._count_score(episode.group)

    def _end_turn(self, episode: _Episode) -> None:
        episode.visits -= 1
        if episode.visits > 0:
            self._enter(self.servers, episode.tokens, episode)
            return
        episode.place = None
        group = episode.group
        self._free(group.hub)
        group.finished += 1
        self.num_played += 1
        enough = self.model.group_size - self.model.redundancy
        if group.finished > enough:
            return
        if self.model.score_s and self.model.scores_early:
            self._enter(self.rewards, self.model.score_s, episode)
        if group.finished == enough:
            self._abort_rest(group)
            if not self.model.score_s:
                self.unread.append(group)
            elif not self.model.scores_early:
                for _ in range(enough):
                    self._enter(self.rewards, self.model.score_s, _Episode(group, 0.0, 0.0, 0))

    def _abort_rest(self, group: _Group) -> None:
        if not self.model.redundancy:
            return
        for episode in group.episodes:
            if episode.visits > 0 and not episode.gone:
                episode.gone = True
                if episode.place is None:  # it waits for a slot
                    self.queued = deque(entry for entry in self.queued if entry[1] is not episode)
                    continue
                episode.place.drop(self.now, episode)
                self._free(group.hub)

    def _free(self, hub: int) -> None:
        self.room[hub] += 1
        self.playing -= 1
        for position, (group, episode) in enumerate(self.queued):
            if group.hub == hub:
                del self.queued[position]
                self._play(episode)
                return

    def _count_score(self, group: _Group) -> None:
        group.to_score += 1
        if group.to_score == self.model.group_size - self.model.redundancy:
            self.unread.append(group)

    def _take(self) -> None:
        """Fill the step from the queue, then read the log until the step is full."""
        while self.taken < self.model.groups_per_step and self.now >= self.takes_at:
            if self._fill_place():
                continue
            if not self.unread:
                return
            group = self.unread.popleft()
            if group.is_kept:
                self.queue.append(group)
            else:
                self.unplaced[group.due] -= 1
                self._issue(1)  # a ticket replaces it

    def _fill_place(self) -> bool:
        """Take the first group that has room into the step; return False if none has."""
        horizon = self._horizon()
        group = next((group for group in self.queue if group.due <= horizon), None)
        if group is None:
            return False
        self.queue.remove(group)
        self.unplaced[group.due] -= 1
        self.taken += 1
        self.free_at = max(self.free_at, self.now) + self.model.group_s
        self.worked += self.model.group_s
        if self.taken == self.model.groups_per_step:
            self.done_at = self.free_at + self.model.step_s
            self.worked += self.model.step_s
        return True

    def _horizon(self) -> float:
        """Return the latest due step whose groups may be taken now, as the ledger decides."""
        if self.model.drops_late:
            return math.inf
        self.unplaced = +self.unplaced  # without steps in which no ticket is due
        return due_horizon(
            sorted(self.unplaced.items()),
            places=self.model.groups_per_step - self.taken - 1,
            version=self.version,
            groups_per_step=self.model.groups_per_step,
        )

    def _complete(self) -> None:
        self.step_ends.append(self.now)
        self.version = self.version + 1
        self.taken = 0
        self.done_at = math.inf
        self.free_at = self.takes_at = self.now + self.model.rest_s
        self.worked += self.model.rest_s
        self._issue(self.model.groups_per_step)


def _draw_work(model: RunModel, groups: int) -> tuple[list[list[float]], list[list[float]]]:
    """Return tokens and the environment's share of the mean time, for each episode of each group.

    The same episode of the same ticket always draws the same, so that two runs differ by their
    change alone.
    """
    size = model.group_size
    rng = np.random.default_rng(0)
    columns = max(64, size)  # a larger group gets more columns of the same table
    own = rng.standard_normal((groups, columns))[:, :size]
    group = rng.standard_normal((groups, 1))
    env = rng.standard_normal((groups, columns))[:, :size]
    mixed = math.sqrt(model.alike) * group + math.sqrt(1 - model.alike) * own
    tokens = model.tokens.at(mixed)
    spread = model.env_spread
    return tokens.tolist(), np.exp(spread * env - spread * spread / 2).tolist()


def _in_proportion(model: RunModel) -> tuple[RunModel, int, int]:
    """Return a smaller run that behaves the same, its steps to simulate, and turns of episodes."""
    visits = max(1, min(MAX_VISITS, round(model.turns)))
    warm = model.max_staleness + 2

    def events(groups: float, visits: int) -> float:
        stations = 2 if model.env_s else 1
        return groups / model.kept * model.group_size * stations * visits + 1

    if events(model.groups_per_step, visits) * (MIN_STEPS + warm) > MAX_EVENTS:
        visits = 1
    share = min(1.0, MAX_EVENTS / (events(model.groups_per_step, visits) * (MIN_STEPS + warm)))
    groups = max(min(MIN_GROUPS, model.groups_per_step), round(model.groups_per_step * share))
    share = groups / model.groups_per_step
    if share < 1:
        parts = {name: getattr(model, name) * share for name in ("servers", "hubs", "reward_hubs")}
        model = replace(model, groups_per_step=groups, group_s=model.group_s / share, **parts)
    steps = int(min(MAX_STEPS, max(MIN_STEPS, MAX_EVENTS / events(groups, visits) - warm)))
    return model, steps + warm, visits


# A search for the best number of servers meets the same models again and again.
@lru_cache(maxsize=512)
def simulate(model: RunModel) -> Prediction:
    """Return what a run reaches once it is steady."""
    small, steps, visits = _in_proportion(model)
    run = _Run(small, steps, visits)
    step_ends = run.run()
    warm = small.max_staleness + 2
    step_s = max((step_ends[-1] - step_ends[warm - 1]) / (len(step_ends) - warm), 1e-9)
    total = max(step_ends[-1], 1e-9)
    server_slots = max(1.0, small.servers * small.slots)
    busy = {
        "learner": run.worked / total,
        "generation": run.servers.busy / total / server_slots,
        "environment": run.played / total / sum(run.most),
        "reward": 0.0,
        "staleness": run.starved / total / sum(run.most),
    }
    if small.score_s:
        busy["reward"] = run.rewards.busy / total / (small.reward_hubs * small.workers)
    shares = {name: min(1.0, value) for name, value in busy.items()}
    return Prediction(
        step_s, model.samples_per_step / step_s, run.servers.inside / max(run.num_played, 1), shares
    )
