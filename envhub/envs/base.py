"""What an environment is to the hub: text in, text out.

A class of your own derives from ``Environment``, names its arguments in a pydantic ``Section`` and implements ``reset``
and ``step``; the config then names it by dotted path or file path. Methods may be plain or ``async``, and each call has
a timeout. Where they run is ``domains.<name>.isolation``, or else what the class says:

- ``process``: in a worker process of its own, which is killed when it hangs, crashes or takes too much memory. What is
  not known to be harmless belongs there, which makes it the default.
- ``thread``: plain methods in a thread of the hub. For code that waits and shares much: one that hangs is left behind,
  but one that crashes, leaks or holds the interpreter's lock hurts its hub.
- ``none``: on the hub's event loop, for code of ours whose calls take microseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from broker.errors import UserError
from broker.settings.config import Section
from rlearner_text.tool_calls import ToolCall

Split = Literal["train", "eval"]
Isolation = Literal["none", "thread", "process"]
Frame = npt.NDArray[np.uint8]  # (height, width, 3)


class NotSupported(UserError):
    """The environment has no such thing: no picture, no solver."""


class Observation(msgspec.Struct, frozen=True):
    """What the policy sees next.

    Attributes:
        text: the user message of the conversation.
        anchor: identical for identical states of one task, empty when states cannot be compared.
    """

    text: str
    anchor: str = ""


class StepResult(msgspec.Struct, frozen=True):
    """What one action did.

    Attributes:
        observation: what the policy sees next; not shown when ``done``.
        reward: of this action alone.
        done: the episode is over.
        valid: whether the text parsed to an action.
        success: whether the task is solved.
        truncated: with ``done``, ended by a limit of the environment's own rather than by an outcome.
        metrics: numbers about the whole episode so far; those of the last step are reported as ``env/<name>``.
    """

    observation: Observation
    reward: float
    done: bool
    valid: bool = True
    success: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}


class Environment:
    """One running instance; it serves one episode after another.

    Attributes:
        Args: pydantic model of ``domains.<name>.env_args``.
        isolation: where its methods run, see above; on an instance, what its domain's config says.
        has_reward: whether steps give a reward; without, the domain must name reward functions.
        prompt: after ``reset``, the question for rewards that read text.
        reference: after ``reset``, the reference answer for rewards that compare with one.
    """

    Args: ClassVar[type[Section]] = Section
    isolation: Isolation = "process"
    has_reward: ClassVar[bool] = True
    prompt: str = ""
    reference: str = ""

    def __init__(self, args: Any) -> None:
        """``args`` is an instance of ``Args``."""
        self.args = args

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuse arguments that cannot work together or name what is not there.

        Raises:
            ConfigError: with the argument's name as key; the caller puts ``domains.<name>.env_args`` before it.
            DataError: a malformed row of a data file.
        """

    @classmethod
    def data_files(cls, args: Any) -> list[str]:
        """Files whose content every hub of a run must share."""
        return []

    @classmethod
    def references(cls, args: Any) -> list[tuple[str, str]]:
        """Where each reference answer of the data stands, and the answer; for rewards that look at them before anything
        starts.
        """
        return []

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        """How many different tasks there are, None when there is no end; a larger index wraps around."""
        return None

    @classmethod
    def tools(cls, args: Any) -> list[dict[str, Any]]:
        """Functions that the policy may call, as JSON schemas in OpenAI's form: ``{"type": "function", "function":
        {...}}``.

        The model's chat template shows them to it and spells its calls, which go to ``use``; words without a call go to
        ``step``.
        """
        return []

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        """``env_args`` of a small instance for the contract tests, which run over every registered environment.

        Args:
            folder: an empty one, for data files that it needs.
        """
        return {}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation | Awaitable[Observation]:
        """Start a task; a pure function of its arguments."""
        raise NotImplementedError

    def step(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Act. Text that is no action is answered by ``valid=False``, never by an exception."""
        raise NotImplementedError

    def use(self, calls: Sequence[ToolCall]) -> StepResult | Awaitable[StepResult]:
        """Act by calling tools, all of one turn; the observation is what they answer. Only with ``tools``.

        A call that is no JSON never gets here: the policy is told so, and its action counts as not valid.
        """
        raise NotImplementedError

    def text_frame(self) -> str:
        """The present state in characters, for replays; empty when there is none."""
        return ""

    def render_frame(self) -> Frame:
        """The present state as a picture.

        Raises:
            NotSupported: it has none.
        """
        raise NotSupported(f"environment {type(self).__name__} draws no pictures")

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """The text that an imperfect solver would send now.

        Args:
            rng: the only source of chance.
            noise: share of actions that are random instead of right.

        Raises:
            NotSupported: it has no solver.
        """
        raise NotSupported(f"environment {type(self).__name__} has no solver for demonstrations")

    def close(self) -> None:
        """Let go of whatever it holds."""


def can_demonstrate(environment: type[Environment]) -> bool:
    """Whether the class brings a solver."""
    return environment.demonstrate is not Environment.demonstrate


def can_render(environment: type[Environment]) -> bool:
    """Whether the class draws its states."""
    return environment.render_frame is not Environment.render_frame
