"""The base class of environments: text in, text out.

Your own class derives from ``Environment``, declares its arguments in a pydantic ``Section`` and
implements ``reset`` and ``step``; the config names it by dotted path or file path. Methods may be
plain or ``async``, and each call has a timeout. They run where ``domains.<name>.isolation``, or
else the class, says:

- ``process``: in their own worker process, which is killed if it hangs, crashes or takes too much
  memory. The default, for all code that is not known to be harmless.
- ``sandbox``: like ``process``, but under bubblewrap, as another user if the hub is root: a
  read-only root with Python, its packages, the environment's code and data, a private ``/tmp``, and
  no network unless ``network`` is set. For code that executes what the policy writes.
- ``thread``: plain methods in a thread of the hub. For code that waits and shares much: a hanging
  thread is abandoned, but code that crashes, leaks or holds the interpreter's lock harms its hub.
- ``none``: on the hub's event loop, for trusted code whose calls take microseconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from broker.errors import UserError
from broker.settings.config import DomainSection, Section
from broker.settings.schema.hubs import EnvhubSection
from rlearner_text.tool_calls import ToolCall

Split = Literal["train", "eval"]
Isolation = Literal["none", "thread", "process", "sandbox"]
WORKER: Final = ("process", "sandbox")  # in a process of its own
History = tuple[tuple[str, str], ...]  # (role, content) of each message
Frame = npt.NDArray[np.uint8]  # (height, width, 3)


class NotSupported(UserError):
    """The environment does not have a picture or a solver."""


class Observation(msgspec.Struct, frozen=True):
    """What the policy sees next.

    Attributes:
        text: the user message of the conversation.
        anchor: identical for identical states of one task, empty if states cannot be compared.
        history: of the first observation, (role, content) of the messages before it: perhaps a
            system message, which replaces that of the domain, then turns of user and assistant.
        seat: in environments with seats, who acts on it.
        actions: in environments with seats, the texts that are legal now, for players that are
            scripts; empty if they are not known.
    """

    text: str
    anchor: str = ""
    history: History = ()
    seat: str = ""
    actions: tuple[str, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """The result of an action.

    Attributes:
        observation: what the policy sees next; not shown if ``done``.
        reward: of this action alone.
        done: the episode is over.
        valid: whether the text parsed to an action.
        success: whether the task is solved.
        truncated: with ``done``, ended by a limit of the environment rather than by an outcome.
        metrics: numbers about the whole episode so far; those of the last step are reported as
            ``env/<name>``.
        seat_rewards: in environments with seats, what this action brings each of them. The seat
            that acted also gets ``reward``.
        seat_successes: with ``done``, the seats that solved their task; so has the seat that acted
            with ``success``.
    """

    observation: Observation
    reward: float
    done: bool
    valid: bool = True
    success: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}
    seat_rewards: dict[str, float] = {}
    seat_successes: tuple[str, ...] = ()


class Environment:
    """One running instance; it plays one episode after another.

    Attributes:
        Args: pydantic model of ``domains.<name>.env_args``.
        isolation: where its methods run, see above; on an instance, as its domain's config says.
        has_reward: whether steps give a reward; if not, the domain must name reward functions.
        prompt: after ``reset``, the question for rewards that read text.
        reference: after ``reset``, the reference answer for rewards that compare with one.
        row: after ``reset``, the task's row in its data set for rewards: JSON values by column, at
            most 1 MiB.
    """

    Args: ClassVar[type[Section]] = Section
    isolation: Isolation = "process"
    has_reward: ClassVar[bool] = True
    prompt: str = ""
    reference: str = ""
    row: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, args: Any) -> None:
        """Keep ``args``, an instance of ``Args``."""
        self.args = args

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuse arguments that contradict each other or name something missing.

        Raises:
            ConfigError: with the argument's name as key; the caller prepends
                ``domains.<name>.env_args``.
            DataError: if a row of a data file is malformed.
        """

    @classmethod
    def check_domain(cls, args: Any, section: DomainSection, envhub: EnvhubSection) -> None:
        """Refuse settings of its domain or its hub with which it cannot work.

        Raises:
            ConfigError: with the key in the domain's section, or one that begins with ``envhub.``.
        """

    @classmethod
    def data_files(cls, args: Any) -> list[str]:
        """Return the files whose content must be the same for every hub of a run."""
        return []

    @classmethod
    def folders(cls, args: Any) -> tuple[list[str], list[str]]:
        """Return the folders that it reads in a sandbox besides its data, and those it writes to.

        What it writes stays in memory and is lost with its processes.
        """
        return [], []

    @classmethod
    def references(cls, args: Any) -> list[tuple[str, str]]:
        """Return the place and text of each reference answer, for rewards that check them early."""
        return []

    @classmethod
    def task_rows(cls, args: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the place and the columns of each task's row, for rewards that check them early."""
        yield from ()

    @classmethod
    def histories(cls, args: Any) -> list[History]:
        """Return a history of each form that its tasks have, to try with the chat template."""
        return []

    @classmethod
    def count_rows(cls, args: Any, is_long: Callable[[str], bool]) -> str:
        """Return what stands out in its data sets, such as duplicates; empty if nothing does.

        Args:
            is_long: whether an observation is too long for the model.
        """
        return ""

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        """Return how many different tasks there are, None if endless.

        A larger index wraps around.
        """
        return None

    @classmethod
    def is_mixed(cls, args: Any) -> bool:
        """Return whether parts of its data have weights of their own; opens no file."""
        return False

    @classmethod
    def task_parts(cls, args: Any) -> Sequence[tuple[int, float]]:
        """Return the number of training tasks and the weight of each part, if it is mixed.

        Task 0 is then the first row of the first part, and so on.
        """
        return []

    @classmethod
    def task_keys(cls, args: Any) -> list[bytes] | None:
        """Return 8 bytes for each training task that equal tasks share, in order of ``reset``.

        None: tasks are generated from the arguments, the seed and the index.
        """
        return None

    @classmethod
    def row_digests(cls, args: Any) -> dict[str, list[bytes]]:
        """Return a digest of each row of its data sets in order, by path; of files and folders."""
        return {}

    @classmethod
    def tools(cls, args: Any) -> list[dict[str, Any]]:
        """Return the functions that the policy may call, in OpenAI's form.

        That is ``{"type": "function", "function": {...}}``. The chat template shows them to the
        model and defines how calls are written; calls go to ``use``, other text to ``step``.
        """
        return []

    @classmethod
    def seats(cls, args: Any) -> tuple[str, ...]:
        """Return the seats, if an episode has several speakers; ``domains.<name>.seats`` says who
        plays each.

        An observation names the seat that acts on it, and reaches that one alone.
        """
        return ()

    @classmethod
    def tool_seats(cls, args: Any) -> tuple[str, ...]:
        """Return the seats that may call the tools."""
        return cls.seats(args)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        """Return ``env_args`` of a small instance for tests; its files go to ``folder``."""
        return {}

    def reset(
        self, task_index: int, split: Split, seed: int
    ) -> Observation | Awaitable[Observation]:
        """Start a task; a pure function of its arguments."""
        raise NotImplementedError

    def step(self, text: str) -> StepResult | Awaitable[StepResult]:
        """Act. Text that is not an action gives ``valid=False``, never an exception."""
        raise NotImplementedError

    def use(self, calls: Sequence[ToolCall]) -> StepResult | Awaitable[StepResult]:
        """Act by calling tools, all of one turn; the observation is their answer.

        A call that is not JSON does not get here: the policy gets an error, and its action counts
        as invalid.
        """
        raise NotImplementedError

    def text_frame(self) -> str:
        """Return the present state in characters for replays, empty if there is none."""
        return ""

    def render_frame(self) -> Frame:
        """Return the present state as a picture.

        Raises:
            NotSupported: if there are no pictures.
        """
        raise NotSupported(f"environment {type(self).__name__} draws no pictures")

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str | Sequence[ToolCall]:
        """Return the text that an imperfect solver would send now, or the tool calls.

        Args:
            rng: the only source of randomness.
            noise: share of actions that are random instead of right.

        Raises:
            NotSupported: if there is no solver.
        """
        raise NotSupported(f"environment {type(self).__name__} has no solver for demonstrations")

    def close(self) -> Awaitable[None] | None:
        """Release all resources."""


def can_demonstrate(environment: type[Environment]) -> bool:
    """Return whether the class has a solver."""
    return environment.demonstrate is not Environment.demonstrate


def can_render(environment: type[Environment]) -> bool:
    """Return whether the class draws its states."""
    return environment.render_frame is not Environment.render_frame
