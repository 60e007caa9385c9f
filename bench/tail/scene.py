"""What the schedules of ``bench.tail`` share: lengths of answers, speed of a server, settings of
the learner.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from learner.credit.ticket_rules import DomainRule, TicketRules

P99_OVER_MEDIAN: Final = 10.0
MEDIAN: Final = 400  # tokens
LIMIT: Final = 16384  # sampling.max_tokens
# share of the variance of log lengths that belongs to the task; the rest is luck
OF_TASK: Final = 0.6
TASKS: Final = 256  # tasks of the data set; every epoch plays each of them once
PROMPT: Final = 64  # tokens

SERVERS: Final = 4
SLOTS: Final = 16  # of one server
STEP_S: Final = 0.010  # a decode step with a batch of one,
SEQUENCE_S: Final = 0.00015  # and what each further sequence adds
PREFILL_S: Final = 0.00005  # for a token of the context, during which the batch waits

GROUP: Final = 8
GROUPS: Final = 64  # groups_per_step
STEPS: Final = 40
WARM_UP: Final = 8  # steps, in which every task comes twice
# time of a training step, of that in which full servers generate its tokens
TRAIN_SHARE: Final = 0.6


@dataclass(frozen=True)
class Lengths:
    """Length of every answer: lognormal, with a part of the task and a part that nobody can know
    before.
    """

    seed: int

    def of(self, task: int, ticket: int, episode: int) -> int:
        """Return the tokens of one answer."""
        spread = math.log(P99_OVER_MEDIAN) / 2.3263
        own = random.Random(f"task {self.seed} {task % TASKS}").gauss(0, spread * OF_TASK**0.5)
        luck = random.Random(f"luck {self.seed} {ticket} {episode}").gauss(
            0, spread * (1 - OF_TASK) ** 0.5
        )
        return max(1, min(LIMIT, round(MEDIAN * math.exp(own + luck))))

    def group(self, task: int, ticket: int) -> list[int]:
        """Return the tokens of a group's answers."""
        return [self.of(task, ticket, episode) for episode in range(GROUP)]


def rules(max_staleness: int) -> TicketRules:
    """Return the learner's settings."""
    domain = DomainRule("tail", 1.0, GROUP, GROUP, 1e9)
    return TicketRules(STEPS, GROUPS, max_staleness, "wait", 0, (domain,))


def train_s() -> float:
    """Return the seconds of a training step."""
    spread = math.log(P99_OVER_MEDIAN) / 2.3263
    tokens = GROUPS * GROUP * MEDIAN * math.exp(spread**2 / 2)
    return TRAIN_SHARE * tokens * (STEP_S + SEQUENCE_S * SLOTS) / (SERVERS * SLOTS)


def throughput(ends: Sequence[float]) -> float:
    """Return steps per second, given when each ended: after the warm-up, as long as credit is
    granted.
    """
    last = len(ends) - 6
    return (last - WARM_UP) / (ends[last] - ends[WARM_UP])


@dataclass
class Batch:
    """Continuous batching of one server: every running answer grows by a token per decode step.

    A decode step takes STEP_S plus SEQUENCE_S per running answer: the weights are read once,
    whatever the batch, and each answer adds its own attention. Time is passed in.
    """

    now: float = 0.0
    grown: float = 0.0  # tokens that an answer which ran all the time would have
    debt_s: float = 0.0  # of prefill, before the batch goes on
    # value of ``grown``, number, id
    ends: list[tuple[float, int, int]] = field(default_factory=list)
    begun: dict[int, float] = field(default_factory=dict)
    # of the answers by id, which may come again
    numbers: dict[int, int] = field(default_factory=dict)
    added: int = 0
    tokens: float = 0.0

    @property
    def running(self) -> int:
        return len(self.begun)

    @property
    def token_s(self) -> float:
        return STEP_S + SEQUENCE_S * self.running

    def advance(self, now: float) -> None:
        """Decode until then."""
        passed = now - self.now
        self.now = now
        paid = min(passed, self.debt_s)
        self.debt_s -= paid
        grown = (passed - paid) / self.token_s
        self.grown += grown
        self.tokens += grown * self.running

    def add(self, one: int, tokens: int, context: int) -> None:
        """Begin an answer of this many tokens."""
        self.debt_s += context * PREFILL_S
        self.begun[one] = self.grown
        self.added += 1
        self.numbers[one] = self.added
        heapq.heappush(self.ends, (self.grown + tokens, self.added, one))

    def remove(self, one: int) -> int:
        """End an answer and return its whole tokens so far."""
        del self.numbers[one]
        return int(self.grown - self.begun.pop(one) + 1e-6)

    def next_end(self) -> float:
        """Return when the next answer ends."""
        while self.ends and self.numbers.get(self.ends[0][2]) != self.ends[0][1]:
            heapq.heappop(self.ends)
        if not self.ends:
            return math.inf
        return self.now + self.debt_s + max(0.0, self.ends[0][0] - self.grown) * self.token_s

    def ended(self) -> list[int]:
        """Return the answers that are complete now."""
        found = []
        while self.ends and self.ends[0][0] <= self.grown + 1e-6:
            _, number, one = heapq.heappop(self.ends)
            if self.numbers.get(one) == number:
                found.append(one)
        return found
