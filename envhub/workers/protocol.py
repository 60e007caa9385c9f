"""What a hub, the process that forks its environments' workers, and these workers say to each other: MessagePack, never a pickle."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from envhub.envs.base import Split

# ------------------------------------------------------------------------------------------ hub and nursery process


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Which domain's environment to run; answered by Ready or Refused."""

    name: str
    section: dict[str, Any]
    memory_mib: int | None
    preload: bool  # import it once and fork it, else each worker imports it


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Workers can be forked. A process of several threads should not be."""

    num_threads: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """A new worker on the socket that comes along; answered by Forked or Refused."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """It is there."""

    pid: int


class Bury(msgspec.Struct, frozen=True, tag=True):
    """Kill a worker with all that it started; answered by Buried."""

    pid: int
    hung_up: bool  # it closed its socket, which means that it is about to exit


class Buried(msgspec.Struct, frozen=True, tag=True):
    """It is gone."""

    how: str  # how it ended by itself or why it was killed before; empty: by this request
    cpu_s: float  # user and system seconds, its children's included


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done."""

    detail: str


# --------------------------------------------------------------------------------------------------- hub and worker


class Make(msgspec.Struct, frozen=True, tag=True):
    """Make the environment; answered by Made."""


class Reset(msgspec.Struct, frozen=True, tag=True):
    """Start a task; answered by Observed."""

    task_index: int
    split: Split
    seed: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Act; answered by Stepped."""

    text: str


class Use(msgspec.Struct, frozen=True, tag=True):
    """Call tools; answered by Stepped."""

    calls: list[tuple[str, dict[str, Any]]]  # name and arguments


class Look(msgspec.Struct, frozen=True, tag=True):
    """The present state in characters; answered by Seen."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the environment; answered by Made."""


class Made(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class Observed(msgspec.Struct, frozen=True, tag=True):
    """The first observation, and what rewards read."""

    text: str
    anchor: str
    prompt: str
    reference: str


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """What one action did; see ``envhub.envs.base.StepResult``."""

    text: str
    anchor: str
    reward: float
    done: bool
    valid: bool
    success: bool
    truncated: bool
    metrics: dict[str, float]
    spent: bool  # the worker has used much of its memory: not for another episode


class Seen(msgspec.Struct, frozen=True, tag=True):
    """Characters; empty when there are none."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The environment raised, or returned what it must not; it is not used again."""

    detail: str
    trace: str = ""  # of what it raised, for the hub's log


ENCODER: Final = msgspec.msgpack.Encoder()
ORDERS: Final[msgspec.msgpack.Decoder[Setup | Fork | Bury]] = msgspec.msgpack.Decoder(Setup | Fork | Bury)
REPORTS: Final[msgspec.msgpack.Decoder[Ready | Forked | Buried | Refused]] = msgspec.msgpack.Decoder(Ready | Forked | Buried | Refused)
QUESTIONS: Final[msgspec.msgpack.Decoder[Make | Reset | Step | Use | Look | Close]] = msgspec.msgpack.Decoder(
    Make | Reset | Step | Use | Look | Close
)
ANSWERS: Final[msgspec.msgpack.Decoder[Made | Observed | Stepped | Seen | Failed]] = msgspec.msgpack.Decoder(
    Made | Observed | Stepped | Seen | Failed
)
