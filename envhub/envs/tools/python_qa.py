"""Questions to answer with a Python tool: the model sees the output of its programs in a sandbox.

``<python>…</python>``, or a tool call of that name with ``code``, runs a program;
``<answer>…</answer>`` ends the episode and is compared with the reference, as numbers if both are,
else as texts. With ``keep`` the earlier programs that ended well are executed again before each,
without their output, so that names stay defined. Set ``sampling.stop: ["</python>", "</answer>"]``.

The sandbox is the one that scores programs (bubblewrap: no network, a read-only root, limits).
Where it does not work nothing starts, unless ``sandbox: none`` accepts that the policy's programs
run unprotected as the hub's user.
"""

from __future__ import annotations

import logging
import math
import threading
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from broker.errors import NotInstalled, UserError
from envhub.envs.base import Observation, StepResult
from envhub.envs.text.asked import QuestionEnvironment
from envhub.envs.text.qa import QuestionAnswer, QuestionAnswerArgs
from envhub.envs.tools import tool_calls
from rlearner_sandbox import Sandbox, SandboxLimits

log = logging.getLogger(__name__)

TOOL: Final = "python"
RERUN_SOURCE: Final = """import contextlib as _contextlib, io as _io
with _contextlib.redirect_stdout(_io.StringIO()), _contextlib.redirect_stderr(_io.StringIO()):
    exec(compile({code!r}, "<earlier>", "exec"), globals())
"""


class PythonArgs(QuestionAnswerArgs):
    """``env_args`` of ``python``; those of ``qa`` name the file of questions."""

    harmless = None  # it runs programs, which the owner of the policy writes

    # none: programs run unprotected, as the hub's user
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    keep: bool = True  # names stay defined from one program to the next
    max_programs: PositiveInt = 8  # in an episode; further ones do not run
    timeout_s: PositiveFloat = 8.0  # of each program, by the clock
    memory_mib: Annotated[int, Field(ge=32)] = 1024  # of a program with all its processes
    output_chars: PositiveInt = 4000  # of a program's output that are shown
    parallel: PositiveInt = 4  # programs at once in one hub
    # folders that programs may import from, besides the standard library
    packages: tuple[str, ...] = ()
    # taken from the reward for a turn with neither a program nor an answer
    format_penalty: NonNegativeFloat = 0.0


class PythonQA(QuestionEnvironment):
    """One question at a time."""

    Args = PythonArgs

    args: PythonArgs

    @classmethod
    def check(cls, args: PythonArgs) -> None:
        super().check(args)
        _sandbox(args)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        env_args = QuestionAnswer.example(folder)
        try:
            _sandbox(PythonArgs.model_validate(env_args))
        except UserError as error:
            raise NotInstalled(f"environment python: {error}") from None
        return env_args

    def _begin(self) -> None:
        self._kept: list[str] = []
        self._programs = 0

    def step(self, text: str) -> StepResult:
        call = tool_calls.parse(text, TOOL, "code")
        metrics = {"programs": float(self._programs)}
        if call is None:
            hint = f"Write <{TOOL}>code</{TOOL}> or <answer>your answer</answer>."
            observation = self._show(f"Neither a program nor an answer was found. {hint}")
            return StepResult(observation, -self.args.format_penalty, False, False, metrics=metrics)
        kind, content = call
        if kind == tool_calls.ANSWER:
            self._show(f"<answer>{content}</answer>")
            is_right = same(content, self.reference)
            return StepResult(
                Observation(""), float(is_right), True, True, is_right, metrics=metrics
            )
        if self._programs >= self.args.max_programs:
            return StepResult(
                self._show("<output>No more programs are run.</output>"),
                0.0,
                False,
                metrics=metrics,
            )
        self._programs += 1
        observation = self._show(f"<output>\n{self._run(bare(content))}\n</output>")
        return StepResult(observation, 0.0, False, metrics={"programs": float(self._programs)})

    def _run(self, code: str) -> str:
        """Return what the program printed, and how it ended if not well."""
        source = "".join(RERUN_SOURCE.format(code=earlier) for earlier in self._kept) + code
        sandbox, free_places = _sandbox(self.args)
        with free_places:
            # a model may write lone surrogates, which no file can hold
            result = sandbox.run(source.encode(errors="replace").decode())
        printed = (result.stdout + result.stderr).decode(errors="replace").rstrip("\n")
        if len(printed) > self.args.output_chars:
            printed = (
                f"{printed[: self.args.output_chars]}\n(cut: it printed {len(printed)} characters)"
            )
        if result.killed_for or result.exit_code:
            cause = f"exit code {result.exit_code}"
            if result.killed_for:
                cause = f"its {result.killed_for} was up"
            return f"{printed}\n(the program ended by {cause})".lstrip("\n")
        if self.args.keep:
            self._kept.append(code)
        return printed or "(nothing was printed)"


def bare(code: str) -> str:
    """Return the program without the fence that some models put around it even within the tag."""
    lines = code.strip().split("\n")
    if lines[0].startswith("```"):
        lines = lines[1:-1] if lines[-1].strip() == "```" else lines[1:]
    return "\n".join(lines)


def same(answer: str, reference: str) -> bool:
    """Return whether both are the same number up to a millionth, or text up to case and blanks."""
    number = _parse_number(answer)
    reference_number = _parse_number(reference)
    if number is not None and reference_number is not None:
        return math.isclose(number, reference_number, rel_tol=1e-6, abs_tol=1e-9)
    return " ".join(answer.lower().split()) == " ".join(reference.lower().split())


def _parse_number(text: str) -> float | None:
    try:
        number = float(text.strip().lstrip("$").replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return number


@lru_cache(maxsize=4)
def _sandbox(args: PythonArgs) -> tuple[Sandbox, threading.Semaphore]:
    """Return the sandbox that runs programs, and a limit on how many run at once.

    Raises:
        UserError: if there is no working sandbox here; says what to do.
    """
    if args.sandbox == "none":
        log.warning(
            "UNSAFE: sandbox is none, so programs that the policy writes run unprotected "
            "on this machine"
        )
    limits = SandboxLimits(
        wall_s=args.timeout_s, cpu_s=math.ceil(args.timeout_s), memory_mib=args.memory_mib
    )
    return Sandbox(limits, args.sandbox, args.packages), threading.Semaphore(args.parallel)
