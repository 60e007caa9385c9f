"""The messages between a hub and its domains' workers, and what their forkserver loads."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.msgpack import Decoder, Encoder

from broker.contract.wire import PlainSettings
from envhub.envs.base import Split


class SetupDomain(msgspec.Struct, frozen=True, tag=True):
    """The domain whose environment to run; see ``rlearner_workers.forkserver``."""

    name: str
    section: PlainSettings
    memory_mib: int | None
    preload: bool  # import it once before forking, else each worker imports it


class MakeEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Make the environment; answered by EnvironmentMade."""


class ResetEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Start a task; answered by FirstObservation."""

    task_index: int
    split: Split
    seed: int


class StepEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Act; answered by StepOutcome."""

    text: str


class UseTools(msgspec.Struct, frozen=True, tag=True):
    """Call tools; answered by StepOutcome."""

    calls: list[tuple[str, dict[str, Any]]]  # name and arguments


class RenderState(msgspec.Struct, frozen=True, tag=True):
    """Show the present state in characters; answered by RenderedState."""


class CloseEnvironment(msgspec.Struct, frozen=True, tag=True):
    """Close the environment; answered by EnvironmentMade."""


class EnvironmentMade(msgspec.Struct, frozen=True, tag=True):
    """The environment was made or closed."""


class FirstObservation(msgspec.Struct, frozen=True, tag=True):
    """The first observation, and what rewards read."""

    text: str
    anchor: str
    prompt: str
    reference: str
    row: dict[str, Any] = {}
    history: tuple[tuple[str, str], ...] = ()
    seat: str = ""
    actions: tuple[str, ...] = ()


class StepOutcome(msgspec.Struct, frozen=True, tag=True):
    """The result of an action; see ``envhub.envs.base.StepResult``."""

    text: str
    anchor: str
    reward: float
    done: bool
    valid: bool
    success: bool
    truncated: bool
    metrics: dict[str, float]
    spent: bool  # the worker has used much of its memory and should not play another episode
    seat: str = ""
    actions: tuple[str, ...] = ()
    seat_rewards: dict[str, float] = {}
    seat_successes: tuple[str, ...] = ()


class RenderedState(msgspec.Struct, frozen=True, tag=True):
    """The present state in characters, empty if there is none."""

    text: str


class EnvironmentFailed(msgspec.Struct, frozen=True, tag=True):
    """The environment raised, or returned something invalid; it is not used again."""

    detail: str
    trace: str = ""  # of the exception, for the hub's log


EnvironmentRequest = (
    MakeEnvironment | ResetEnvironment | StepEnvironment | UseTools | RenderState | CloseEnvironment
)
Answer = EnvironmentMade | FirstObservation | StepOutcome | RenderedState | EnvironmentFailed

ENCODER: Final = Encoder()
SETUPS: Final[Decoder[SetupDomain]] = Decoder(SetupDomain)
REQUESTS: Final[Decoder[EnvironmentRequest]] = Decoder(EnvironmentRequest)
ANSWERS: Final[Decoder[Answer]] = Decoder(Answer)
