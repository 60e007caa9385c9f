"""A hub's tickets from their delivery to their only end, with its real slots, health and player."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from envhub_kit import domain
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.contract import wire
from broker.contract.streams import TICKETS
from broker.runtime.work_health import WorkHealth
from broker.settings.run_settings import RunSettings
from envhub.episodes.ticket_player import TicketPlayer
from envhub.scheduling.slots import EpisodeSlots
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.tickets.intake import REDELIVERY_DELAY_S, TicketIntake
from envhub.tickets.outbox import InHand
from envhub.tickets.suspicion import TicketJudgement

TICK_TURNS = 5  # of the event loop, between two ticks
LAKE = domain("frozenlake", name="lake")
Script = Callable[[EpisodeTask, int], EpisodeResult | Exception]


@dataclass
class FakeDelivery:
    """A ticket as the queue delivers it."""

    message: wire.Message | None
    num_delivered: int = 1
    has_lapsed: bool = False
    error: str = ""
    stored_at: float = 0.0


@dataclass
class EndsSeen:
    """Stands for the outbox: how each ticket ended."""

    ends: list[tuple[Any, ...]] = field(default_factory=list)

    def finish(self, ticket: InHand, results: list[EpisodeResult]) -> None:
        numbers = [result.trajectory.episode for result in results]
        self.ends.append((ticket.assignment.number, "group", numbers))

    def close(self, ticket: InHand, reason: str, detail: str) -> None:
        self.ends.append((ticket.assignment.number, "closed", reason))

    def hand_back(self, ticket: InHand, delay_s: float, detail: str) -> None:
        self.ends.append((ticket.assignment.number, "back", delay_s))

    def abandon(self, ticket: InHand) -> None:
        self.ends.append((ticket.assignment.number, "abandoned"))

    def refuse(self, stream: Any, name: str, delivery: FakeDelivery, problem: str) -> None:
        self.ends.append((0, "refused", problem))


class Hub:
    """An intake between a script, which says how each episode ends, and the ends seen.

    Args:
        script: returns the outcome of an attempt at an episode, given how many there were before.
        judgements: of redelivered tickets, by number; None: another hub plays it.
    """

    def __init__(
        self,
        script: Script,
        *,
        slots: int = 4,
        retries: int = 1,
        threshold: int = 100,
        judgements: dict[int, TicketJudgement | None] | None = None,
    ) -> None:
        self.script = script
        self.attempts = Counter[tuple[int, int]]()
        self.background: set[asyncio.Task[None]] = set()
        self.most = 0
        self.now = Counter[int]()  # episodes that are played, by ticket
        self.noted: list[int] = []
        runs = RunSettings.of_config({"domains": {"lake": {"env": "frozenlake"}}})
        member = SimpleNamespace(
            id="hub", bus=None, settings=runs, spawn=self.spawn, spans=SimpleNamespace(traces=None)
        )
        self.slots = EpisodeSlots(slots, retries)

        async def no_trial(_key: str, _number: int) -> tuple[bool | None, str]:
            return None, ""

        health = WorkHealth(
            "domain", ["lake"], lambda _: threshold, trial=no_trial, changed=lambda: None
        )
        lengths = SimpleNamespace(length=lambda *_: 0, left_s=lambda *_: 0.0)
        self.intake = TicketIntake(
            member,  # type: ignore[arg-type]
            {"lake": LAKE},
            episode_slots=self.slots,
            health=health,
            generator=SimpleNamespace(open=lengths, hurry=lambda _: None),  # type: ignore[arg-type]
            clock=SimpleNamespace(now=lambda: 0.0),  # type: ignore[arg-type]
            play=TicketPlayer(
                SimpleNamespace(play=self.play),  # type: ignore[arg-type]
                SimpleNamespace(score=self.score),  # type: ignore[arg-type]
            ).play,
        )
        self.seen = EndsSeen()
        self.intake.outbox = self.seen  # type: ignore[assignment]
        known = judgements or {}

        async def judge(assignment: Any, _deliveries: int) -> TicketJudgement | None:
            await asyncio.sleep(0)
            return known.get(assignment.number, TicketJudgement(0))

        async def begin(assignment: Any, _judgement: TicketJudgement) -> int:
            self.noted.append(assignment.number)
            return 1

        self.intake.attempts = SimpleNamespace(judge=judge, begin=begin)  # type: ignore[assignment]

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def score(self, task: EpisodeTask, result: EpisodeResult) -> None:
        """Score as a hub without teachers does."""

    async def play(self, task: EpisodeTask, _report: Any) -> EpisodeResult:
        key = (task.ticket, task.episode)
        self.now[task.ticket] += 1
        self.most = max(self.most, self.now.total())
        try:
            await asyncio.sleep(0)
            outcome = self.script(task, self.attempts[key])
        finally:
            self.now[task.ticket] -= 1
            self.attempts[key] += 1
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def deliver(self, number: int, *, size: int = 2, deliveries: int = 1) -> FakeDelivery:
        ticket = wire.Ticket(
            number=number, domain="lake", task_index=number, seed=0, min_version=0,
            group_size=size, min_group_size=size, deadline_s=1000.0, max_staleness=4,
        )  # fmt: skip
        delivery = FakeDelivery(ticket, deliveries)
        self.intake.accept(TICKETS, "lake", delivery)  # type: ignore[arg-type]
        return delivery

    async def settle(self) -> list[tuple[Any, ...]]:
        """Wait until nothing runs, ticking as a hub does; return the ends."""
        while True:
            for _ in range(TICK_TURNS):
                await asyncio.sleep(0)
            actions = self.slots.tick(0.0, idle=True, left_s=self.intake.left_s)
            self.intake.perform(actions)
            running = [ticket.tasks for ticket in self.intake.in_hand.values() if ticket.tasks]
            if not (actions or running or self.background):
                return self.seen.ends


TURN = wire.Turn(start=1, end=2, reward=1.0, valid=True, finish_reason="stop", server="s")


def won(task: EpisodeTask, _before: int = 0) -> EpisodeResult:
    mask = wire.column([0, 1], "|u1")
    trajectory = wire.Trajectory(
        episode=task.episode, token_ids=wire.column([1, 2], "<i4"), loss_mask=mask,
        logprobs=wire.column([0.0, -1.0], "<f4"), version_runs=wire.column([0, 1], "<i4"),
        turns=[TURN], reward=1.0, success=True, end="terminated",
        reward_parts={"env": 1.0},
    )  # fmt: skip
    return EpisodeResult([trajectory], "", "", 0.0, 0.0, [])


def fails(kind: Any, times: int = 1) -> Script:
    """Return a script in which the first attempts at episode 1 fail."""

    def script(task: EpisodeTask, before: int) -> EpisodeResult | Exception:
        if (task.ticket, task.episode) == (1, 1) and before < times:
            return EpisodeFailed(kind, "no")
        return won(task)

    return script


async def test_a_group_ends_with_all_episodes_in_order() -> None:
    hub = Hub(won, slots=3)
    hub.deliver(1, size=5)
    assert await hub.settle() == [(1, "group", [0, 1, 2, 3, 4])]
    assert (hub.most, hub.intake.in_hand, hub.slots.running) == (3, {}, 0)


@pytest.mark.parametrize(
    ("script", "end"),
    [
        (fails("env"), (1, "group", [0, 1])),
        (fails("env", 2), (1, "closed", "env_error")),
        (fails("timeout", 2), (1, "closed", "timeout")),
        (fails("fatal"), (1, "closed", "env_error")),
        (fails("large"), (1, "closed", "too_large")),
        (fails("generate", 2), (1, "back", 1.0)),
    ],
)
async def test_what_failed_decides_how_a_ticket_ends(script: Script, end: Any) -> None:
    hub = Hub(script, slots=3)
    hub.deliver(1)
    # episodes of another ticket succeed in between, so that the failure is this one's own
    hub.deliver(2, size=20)
    ends = await hub.settle()
    assert sorted(ends) == [end, (2, "group", [*range(20)])]
    assert (hub.intake.in_hand, hub.slots.running) == ({}, 0)


async def test_a_bug_of_the_hub_costs_one_attempt() -> None:
    def script(task: EpisodeTask, before: int) -> EpisodeResult | Exception:
        return won(task) if before else ZeroDivisionError("a bug")

    hub = Hub(script)
    hub.deliver(1)
    assert await hub.settle() == [(1, "group", [0, 1])]
    assert hub.intake.tally.failures == 2


async def test_a_message_of_another_queue_is_refused() -> None:
    hub = Hub(won)
    other = wire.Closed(ticket=1, domain="other", reason="late", detail="", by="", eval_step=-1)
    assert hub.intake.accept(TICKETS, "lake", FakeDelivery(other)) == 0  # type: ignore[arg-type]
    nothing = FakeDelivery(None, error="not msgpack")
    assert hub.intake.accept(TICKETS, "lake", nothing) == 0  # type: ignore[arg-type]
    assert [end[1:] for end in hub.seen.ends] == [
        ("refused", "a ticket of another domain in the queue of lake"),
        ("refused", "not msgpack"),
    ]


async def test_a_redelivery_of_a_ticket_in_hand_is_acknowledged_in_its_place() -> None:
    hub = Hub(won)
    hub.deliver(1)
    again = hub.deliver(1, deliveries=2)
    (ticket,) = hub.intake.in_hand.values()
    assert ticket.delivery is again
    assert await hub.settle() == [(1, "group", [0, 1])]
    assert hub.noted == []


@pytest.mark.parametrize(
    ("judgement", "end", "noted"),
    [
        (TicketJudgement(1), (1, "group", [0, 1]), [1]),
        (TicketJudgement(9, poisonous=True), (1, "closed", "env_error"), []),
        (None, (1, "back", REDELIVERY_DELAY_S), []),
    ],
)
async def test_a_redelivered_ticket_is_judged_first(
    judgement: TicketJudgement | None, end: Any, noted: list[int]
) -> None:
    hub = Hub(won, judgements={1: judgement})
    hub.deliver(1, deliveries=3)
    assert hub.now.total() == 0
    ends = await hub.settle()
    assert (ends[0][:2], hub.noted) == (end[:2], noted)
    if end[1] != "closed":
        assert ends == [end]


async def test_a_suspect_is_played_alone() -> None:
    together: set[tuple[int, ...]] = set()

    def script(task: EpisodeTask, _before: int) -> EpisodeResult:
        together.add(tuple(sorted({number for number, count in hub.now.items() if count})))
        return won(task)

    hub = Hub(script, slots=8, judgements={1: TicketJudgement(2)})
    hub.deliver(2, size=2)
    hub.deliver(1, size=3, deliveries=3)
    hub.deliver(3, size=2)
    hub.deliver(4, size=2)
    ends = await hub.settle()
    assert sorted(end[:2] for end in ends) == [(number, "group") for number in (1, 2, 3, 4)]
    assert {numbers for numbers in together if 1 in numbers} == {(1,)}
    assert (3, 4) in together


async def test_a_hub_that_slept_abandons_what_others_may_play() -> None:
    hub = Hub(fails("env"))
    first, second = hub.deliver(1), hub.deliver(2, size=1)
    first.has_lapsed = True
    assert second.has_lapsed is False
    ends = await hub.settle()
    assert (1, "abandoned") in ends
    assert (2, "group", [0]) in ends
    assert len(ends) == 2


async def test_tickets_of_a_domain_that_fails_here_go_to_other_hubs() -> None:
    def script(task: EpisodeTask, _before: int) -> EpisodeFailed:
        return EpisodeFailed("machine", "no memory")

    hub = Hub(script, retries=9, threshold=2)
    for number in (1, 2):
        hub.deliver(number)
    ends = await hub.settle()
    assert sorted(end[:2] for end in ends) == [(1, "back"), (2, "back")]
    assert hub.attempts.total() <= 4  # at once, whatever tries they had left
    hub.deliver(3)
    assert hub.seen.ends[-1][:2] == (3, "back")
    assert hub.intake.in_hand == {}


KINDS = ["won", "won", "env", "timeout", "generate", "machine", "fatal", "large", "bug"]


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    outcomes=st.lists(st.sampled_from(KINDS), min_size=1, max_size=40),
    slots=st.integers(1, 6),
    deliveries=st.lists(st.integers(1, 3), min_size=6, max_size=6),
)
def test_every_ticket_ends_exactly_once(
    sizes: list[int], outcomes: list[str], slots: int, deliveries: list[int]
) -> None:
    drawn = iter(outcomes)

    def script(task: EpisodeTask, _before: int) -> EpisodeResult | Exception:
        kind: Any = next(drawn, "won")
        if kind == "bug":
            return RuntimeError("a bug")
        return won(task) if kind == "won" else EpisodeFailed(kind, "no")

    async def run() -> None:
        hub = Hub(script, slots=slots, threshold=3)
        for number, size in enumerate(sizes, 1):
            hub.deliver(number, size=size, deliveries=deliveries[number - 1])
        ends = await hub.settle()
        assert sorted(end[0] for end in ends) == list(range(1, len(sizes) + 1))
        assert (hub.intake.in_hand, hub.slots.running, hub.now.total()) == ({}, 0, 0)
        for number, kind, *rest in ends:
            if kind == "group":
                assert rest == [list(range(sizes[number - 1]))]

    asyncio.run(run())
