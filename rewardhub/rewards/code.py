"""Runs the program in the last fenced block of a response against tests, in a sandbox.

    rewards: [{name: code, args: {timeout_s: 20, cpu_s: 4}}]
    python -m rewardhub.rewards.code train.jsonl --tests tests  # are all rows' tests well formed?

``rewardhub.rewards.code_tests`` describes the forms of tests; asserts and test files take a second
process. ``timeout_s`` must be below ``rewardhub.timeout_s``, because the hub treats a late score as
a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from typing import Annotated, Any, Final, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from broker.settings.config import Section
from rewardhub.rewards.base import InvalidScoreError, Sample, Scored
from rewardhub.rewards.code_tests import (
    FunctionCallTests,
    InvalidTestsError,
    StatementTests,
    StdioTests,
    parse,
)
from rewardhub.rewards.thinking import Thinking, visible_text
from rlearner_sandbox import ProgramChecks, ProgramEnd, Sandbox
from rlearner_sandbox.command import SandboxLimits

log = logging.getLogger(__name__)

FENCE: Final = "```"
# Characters that are searched, from the end.
LONGEST_RESPONSE: Final = 1 << 20
OUTCOMES: Final = ("compiled", "timeout", "memory", "crashed")


class CodeArgs(Section):
    """Arguments of the reward ``code``."""

    harmless = ("thinking", "all_or_nothing", "timeout_s")

    # none: programs of the policy run unprotected, as the hub's own user
    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    # keep: programs in <think> count; required: without </think> there is none
    thinking: Thinking = "drop"
    all_or_nothing: bool = False  # 1 if every test passes, else 0; otherwise the share that passes
    timeout_s: PositiveFloat = 8.0  # wall time of all tests of one response
    cpu_s: PositiveInt = 4  # processor time of one program, for each pair
    # of a program with all its processes; the same for its tests
    memory_mib: Annotated[int, Field(ge=32)] = 1024
    processes: PositiveInt = 32  # and threads
    open_files: Annotated[int, Field(ge=8)] = 64
    output_kib: PositiveInt = 1024
    file_mib: PositiveInt = 64  # of one file, and of all together
    # folders that programs may import from, in addition to the standard library
    packages: tuple[str, ...] = ()


class CodeReward:
    """Reward: the share of tests that pass.

    The notes ``compiled``, ``timeout``, ``memory`` and ``crashed`` are 1 if that happened in any
    test, else 0.

    Raises:
        NoSandbox: if bubblewrap is missing or does not work here; names a fix.
    """

    Args = CodeArgs

    def __init__(self, args: CodeArgs) -> None:
        self._args = args
        limits = SandboxLimits(
            wall_s=args.timeout_s,
            cpu_s=args.cpu_s,
            memory_mib=args.memory_mib,
            processes=args.processes,
            open_files=args.open_files,
            output_kib=args.output_kib,
            file_mib=args.file_mib,
        )
        if args.sandbox == "none":
            log.warning(
                "UNSAFE: sandbox is none, so programs that the policy writes run unprotected on "
                "this machine"
            )
        self._sandbox = Sandbox(limits, args.sandbox, args.packages)
        self._last: tuple[str | None, StdioTests | FunctionCallTests | StatementTests] = (
            None,
            StdioTests((), ()),
        )

    def score(self, sample: Sample) -> Scored:
        """Return the reward of one response.

        Raises:
            InvalidScoreError: if the reference holds no valid tests, a fault of the data; names
                domain and task.
            SandboxFailed: if the sandbox did not work this time.
        """
        # The episodes of a group share their reference.
        if sample.reference != self._last[0]:
            try:
                self._last = (sample.reference, parse(sample.reference))
            except InvalidTestsError as error:
                raise InvalidScoreError(
                    f"domain {sample.domain!r}, task {sample.task_index}, its tests: {error}"
                ) from None
        program = last_block(visible_text(sample.response, self._args.thinking))
        if program is None:
            return self._scored(0.0, [])
        tests = self._last[1]
        run = (
            self._pairs(program, tests)
            if isinstance(tests, StdioTests)
            else self._in_one(program, tests)
        )
        return self._scored(*run)

    def _in_one(
        self, program: str, tests: FunctionCallTests | StatementTests
    ) -> tuple[float, list[ProgramEnd]]:
        """Run all tests of functions with one process of the program."""
        if isinstance(tests, StatementTests):
            end = self._sandbox.run(
                program, mode="asserts", tests=ProgramChecks(tests.first, tests.cases)
            )
            return sum(index in end.answers for index in range(len(tests.cases))) / len(
                tests.cases
            ), [end]
        end = self._sandbox.run(
            program, mode="calls", tests=ProgramChecks(tests.function, tests.arguments)
        )
        right = sum(
            _same_value(end.answers.get(index), result)
            for index, result in enumerate(tests.results)
        )
        return right / len(tests.results), [end]

    def _pairs(self, program: str, tests: StdioTests) -> tuple[float, list[ProgramEnd]]:
        """Run one process for each pair, until the time is up or the outcome is certain."""
        until = time.monotonic() + self._args.timeout_s
        runs: list[ProgramEnd] = []
        right = 0
        for stdin, expected in zip(tests.inputs, tests.outputs, strict=True):
            remaining_s = until - time.monotonic()
            if (
                remaining_s <= 0
                or (runs and not runs[-1].compiled)
                or (self._args.all_or_nothing and right < len(runs))
            ):
                break
            runs.append(self._sandbox.run(program, stdin=stdin.encode(), wall_s=remaining_s))
            last = runs[-1]
            output = runs[-1].stdout.decode("utf-8", "replace")
            right += last.exit_code == 0 and not last.killed_for and same_output(output, expected)
        return right / len(tests.inputs), runs

    def _scored(self, share: float, runs: list[ProgramEnd]) -> Scored:
        late = any(run.timed_out for run in runs)
        fat = any(run.out_of_memory for run in runs)
        crashed = any(
            run.exit_code != 0 and run.compiled and not (run.timed_out or run.out_of_memory)
            for run in runs
        )
        flags = [float(flag) for flag in (bool(runs) and runs[0].compiled, late, fat, crashed)]
        passed = float(share == 1.0) if self._args.all_or_nothing else share
        return Scored(passed, dict(zip(OUTCOMES, flags, strict=True)))


def last_block(response: str) -> str | None:
    """Return the text in the last closed fenced block, or None."""
    block: str | None = None
    fence = ""
    lines = list[str]()
    for line in response[-LONGEST_RESPONSE:].splitlines():
        bare = line.strip()
        if not fence:
            if bare.startswith(FENCE):
                fence = bare[: len(bare) - len(bare.lstrip("`"))]
                lines = []
        elif bare.startswith(fence) and not bare.strip("`"):
            block = "\n".join(lines) + "\n"
            fence = ""
        else:
            lines.append(line)
    return block


def same_output(output: str, expected: str) -> bool:
    """Compare outputs by line, ignoring trailing blanks and trailing empty lines."""
    output_lines, expected_lines = (
        [line.rstrip() for line in text.rstrip().splitlines()] for text in (output, expected)
    )
    return output_lines == expected_lines


def _same_value(answer: str | None, expected: Any) -> bool:
    if answer is None:
        return False
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    # Some data sets wrap each result in a list.
    return bool(
        value == expected
        or (isinstance(expected, list) and len(expected) == 1 and value == expected[0])
    )


def main() -> int:
    """Check the tests in a JSONL file; return 0 if all are well formed."""
    about = "Check the tests in a JSONL file."
    options = argparse.ArgumentParser(prog="python -m rewardhub.rewards.code", description=about)
    options.add_argument("file", help="JSONL")
    options.add_argument(
        "--tests", default="tests", metavar="COLUMN", help="the column with the tests (tests)"
    )
    arguments = options.parse_args()
    number = bad = 0
    try:
        with open(arguments.file, encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                    if not isinstance(row, dict) or not isinstance(row.get(arguments.tests), str):
                        raise InvalidTestsError(f"column {arguments.tests!r} holds no text")
                    parse(row[arguments.tests])
                except ValueError as error:
                    bad += 1
                    print(f"{arguments.file}:{number}: {error}")
    except OSError as error:
        print(f"error: {arguments.file}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{number} rows, {bad} with bad tests")
    return 2 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
