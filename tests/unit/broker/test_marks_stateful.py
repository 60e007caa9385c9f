"""Who may end a message, under any interleaving of processes that freeze, lose their connection or
their packets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.contract.streams import ACK_WAIT_S
from broker.jetstream import ack_progress
from broker.jetstream.ack_progress import AckProgress
from broker.jetstream.delivery import delivery_numbers
from broker.nats.nats_errors import Disconnected

TICK_S = 0.5
PROCESSES = 3
MESSAGES = 2


def ack_subject(number: int, num_delivered: int) -> str:
    return f"$JS.ACK.stream.consumer.{num_delivered}.{number}.1.1.0"


def delivery_of(subject: str) -> tuple[int, int]:
    """The message of an acknowledgement subject, and how often it had been delivered."""
    num_delivered, number, _ = delivery_numbers(subject)
    return number, num_delivered


@dataclass
class Pending:
    """A message as the broker sees it."""

    num_delivered: int = 0
    holder: int = -1  # process of the newest delivery
    due_at: float = -1.0  # when it may be delivered again


@dataclass
class Link:
    """A process's connection. While packets are lost nobody knows it; they arrive later if it does
    not break.
    """

    mark: Callable[[str], None]
    is_up: bool = True
    loses_packets: bool = False
    sent: list[str] = field(default_factory=list)
    server_id: str = "server"
    clustered: bool = False

    @property
    def connected(self) -> Link:
        return self

    def is_set(self) -> bool:
        return self.is_up

    async def send(self, subject: str, _: bytes) -> None:
        if not self.is_up:
            raise Disconnected("down")
        if self.loses_packets:
            self.sent.append(subject)
        else:
            self.mark(subject)

    async def call(self, subject: str, payload: bytes, *, timeout_s: float) -> None:
        await self.send(subject, payload)
        if self.loses_packets:
            raise TimeoutError

    def doubt(self, *_: object) -> None: ...

    def trust(self, *_: object) -> None: ...


class Marks(RuleBasedStateMachine):
    """A broker that gives a message to another process once it had no mark for ``ACK_WAIT_S``."""

    @initialize()
    def start(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.now = 1000.0
        self.patch.setattr(ack_progress, "_boot_seconds", lambda: self.now)
        self.messages = [Pending() for _ in range(MESSAGES)]
        self.links = [Link(self.mark) for _ in range(PROCESSES)]
        self.marks = [AckProgress("nats://x", str(one), lambda: 30.0) for one in range(PROCESSES)]
        self.frozen = set[int]()
        self.held: list[set[str]] = [set() for _ in range(PROCESSES)]
        self.undisturbed = set(range(PROCESSES))

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    def mark(self, subject: str) -> None:
        """Apply a mark to the message, whichever delivery it names, as JetStream does."""
        message = self.messages[delivery_of(subject)[0]]
        if message.holder >= 0 and message.due_at > self.now:
            message.due_at = self.now + ACK_WAIT_S

    def step(self, process: int) -> None:
        async def work() -> None:
            marks, link = self.marks[process], self.links[process]
            around: Any = link
            await marks._mark_due(around)
            if marks._asking is not None:
                await marks._asking

        asyncio.run(work())

    # ---- events
    @rule(process=st.integers(0, PROCESSES - 1), number=st.integers(0, MESSAGES - 1))
    def deliver(self, process: int, number: int) -> None:
        message, link = self.messages[number], self.links[process]
        if (
            message.due_at > self.now
            or process in self.frozen
            or not link.is_up
            or link.loses_packets
        ):
            return
        message.num_delivered, message.holder = message.num_delivered + 1, process
        message.due_at = self.now + ACK_WAIT_S
        subject = ack_subject(number, message.num_delivered)
        self.held[process].add(subject)
        self.marks[process].hold(subject, ACK_WAIT_S)

    @rule(process=st.integers(0, PROCESSES - 1))
    def freeze_or_wake(self, process: int) -> None:
        self.frozen ^= {process}
        self.undisturbed.discard(process)

    @rule(process=st.integers(0, PROCESSES - 1))
    def lose_packets_or_find_them(self, process: int) -> None:
        link = self.links[process]
        self.undisturbed.discard(process)
        link.loses_packets = link.is_up and not link.loses_packets
        if not link.loses_packets:
            for subject in link.sent:
                self.mark(subject)
            link.sent = []

    @rule(process=st.integers(0, PROCESSES - 1))
    def break_or_connect(self, process: int) -> None:
        """Break the connection, which a frozen process learns later, or connect to the same server
        again.
        """
        if process in self.frozen:
            return
        link = self.links[process]
        self.undisturbed.discard(process)
        link.is_up, link.loses_packets, link.sent = not link.is_up, False, []
        if not link.is_up:
            self.marks[process]._forget_unproven()

    @rule(ticks=st.sampled_from([1, 2, 5, 13, 30]))
    def time_passes(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now += TICK_S
            for process in range(PROCESSES):
                if process not in self.frozen:
                    self.step(process)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([one for one in range(PROCESSES) if self.held[one]]))
        subject = data.draw(st.sampled_from(sorted(self.held[process])))
        self.held[process].discard(subject)
        if self.marks[process].is_proven(subject) and self.links[process].is_up:
            number, num_delivered = delivery_of(subject)
            self.messages[number] = Pending(num_delivered)
        self.marks[process].release(subject)

    # ---- what must hold
    @invariant()
    def only_the_holder_may_end_a_message(self) -> None:
        if not hasattr(self, "held"):
            return
        for process, subjects in enumerate(self.held):
            for subject in subjects:
                number, delivered = delivery_of(subject)
                message = self.messages[number]
                if self.marks[process].is_proven(subject):
                    assert (message.holder, message.num_delivered) == (process, delivered)
                    assert not self.marks[process].has_lapsed(subject)
                if process in self.undisturbed:
                    assert self.marks[process].is_proven(subject)


TestMarks = Marks.TestCase
TestMarks.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
