"""What a hub, the process that forks its environments' workers, and these workers say to each other: MessagePack, never
a pickle.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from envhub.envs.base import Split

# ------------------------------------------------------------------------------------------ hub and nursery process


class SetupDomain(msgspec.Struct, frozen=True, tag=True):
    """Which domain's environment to run; answered by Ready or Refused."""

    name: str
    section: dict[str, Any]
    memory_mib: int | None
    preload: bool  # import it once and fork it, else each worker imports it


class ForkserverReady(msgspec.Struct, frozen=True, tag=True):
    """Workers can be forked. A process of several threads should not be."""

    num_threads: int


class ForkWorker(msgspec.Struct, frozen=True, tag=True):
    """A new worker on the socket that comes along; answered by Forked or Refused."""


class WorkerForked(msgspec.Struct, frozen=True, tag=True):
    """It is there."""

    pid: int


class ReapWorker(msgspec.Struct, frozen=True, tag=True):
    """Kill a worker with all that it started; answered by Buried."""

    pid: int
    hung_up: bool  # it closed its socket, which means that it is about to exit


class WorkerReaped(msgspec.Struct, frozen=True, tag=True):
    """It is gone."""

    how: str  # how it ended by itself or why it was killed before; empty: by this request
    cpu_s: float  # user and system seconds, its children's included


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """It cannot be done."""

    detail: str


# --------------------------------------------------------------------------------------------------- hub and worker


class MakeEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Make the environment; answered by Made."""


class ResetEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Start a task; answered by Observed."""

    task_index: int
    split: Split
    seed: int


class StepEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Act; answered by Stepped."""

    text: str


class UseTools(msgspec.Struct, frozen=True, tag=True):
    """Call tools; answered by Stepped."""

    calls: list[tuple[str, dict[str, Any]]]  # name and arguments


class RenderState(msgspec.Struct, frozen=True, tag=True):
    """The present state in characters; answered by Seen."""


class CloseEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Close the environment; answered by Made."""


class EnvironmentMade(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class FirstObservation(msgspec.Struct, frozen=True, tag=True):
    """The first observation, and what rewards read."""

    text: str
    anchor: str
    prompt: str
    reference: str


class StepOutcome(msgspec.Struct, frozen=True, tag=True):
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


class RenderedState(msgspec.Struct, frozen=True, tag=True):
    """Characters; empty when there are none."""

    text: str


class EnvironmentFailed(msgspec.Struct, frozen=True, tag=True):
    """The environment raised, or returned what it must not; it is not used again."""

    detail: str
    trace: str = ""  # of what it raised, for the hub's log


ENCODER: Final = msgspec.msgpack.Encoder()
ORDERS: Final[msgspec.msgpack.Decoder[SetupDomain | ForkWorker | ReapWorker]] = msgspec.msgpack.Decoder(
    SetupDomain | ForkWorker | ReapWorker
)
REPORTS: Final[msgspec.msgpack.Decoder[ForkserverReady | WorkerForked | WorkerReaped | RequestRefused]] = (
    msgspec.msgpack.Decoder(ForkserverReady | WorkerForked | WorkerReaped | RequestRefused)
)
QUESTIONS: Final[
    msgspec.msgpack.Decoder[
        MakeEnvironment | ResetEnvironment | StepEnvironment | UseTools | RenderState | CloseEnvironment
    ]
] = msgspec.msgpack.Decoder(
    MakeEnvironment | ResetEnvironment | StepEnvironment | UseTools | RenderState | CloseEnvironment
)
ANSWERS: Final[
    msgspec.msgpack.Decoder[EnvironmentMade | FirstObservation | StepOutcome | RenderedState | EnvironmentFailed]
] = msgspec.msgpack.Decoder(EnvironmentMade | FirstObservation | StepOutcome | RenderedState | EnvironmentFailed)
