"""The reward ``code``: programs against tests in a real sandbox; what is the policy's fault, the
data's, and nobody's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.errors import ConfigError
from rewardhub.rewards import loading
from rewardhub.rewards.base import InvalidScoreError, Sample, Scored
from rewardhub.rewards.code import CodeArgs, CodeReward, last_block, same_output
from rewardhub.rewards.code_tests import (
    FunctionCallTests,
    InvalidTestsError,
    StatementTests,
    StdioTests,
    parse,
)
from rlearner_sandbox import SandboxFailed

SWAP = "class Solution:\n    def add(self, a, b): return (a, b)"
DEEP = (
    "import sys; sys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\ndef add(a, b): return a + b + "
    "f(20000) * 0"
)
FILE = "from solution import add as plus\ndef test_a(): assert plus(1, 1) == 2\ndef test_b(): assert add(1, 1) == 3"
STUBBORN = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"  # only SIGKILL ends it
CLASSES = """
import unittest
class Base(unittest.TestCase):
    @classmethod
    def setUpClass(cls): cls.two = 2
    def test_base(self): self.assertEqual(add(1, 1), self.two)
class Derived(Base):
    def test_wrong(self): self.assertEqual(add(1, 1), 3)
class TestPlain:
    def setup_method(self): self.one = 1
    def test_right(self): assert add(self.one, 1) == 2
    def test_wrong(self): assert add(self.one, 1) == 3
async def test_wrong(): assert add(1, 1) == 3
async def test_right(): assert add(1, 1) == 2
class NoTests: pass
class TestNothing(NoTests):
    def helper(self): pass
    def test_wrong(self): assert add(1, 1) == 3
"""
RAISES = "def add(a, b):\n    if b < 0: raise ValueError(f'{b} is negative')\n    return a + b / 3"
PYTEST = """
import pytest
from pytest import approx
def test_raises():
    with pytest.raises(ValueError, match="-1 is neg") as caught:
        add(1, -1)
    assert str(caught.value) == "-1 is negative"
def test_does_not_raise():
    with pytest.raises(ValueError):
        add(1, 1)
def test_raises_another():
    with pytest.raises(TypeError):
        add(1, -1)
def test_nearly(): assert add(1, 1) == approx(1.3333333333) and [add(1, 1)] == approx([4 / 3]) != approx([1.33])
def test_called(): pytest.raises(ValueError, add, 1, -1)
"""
ADD = "def add(a, b):\n    return a + b\n"
ASSERTS = json.dumps(["assert add(1, 2) == 3", "assert add(2, 2) == 4", "assert add(1, 1) == 3"])
DOUBLE = json.dumps({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4", "6"]]})
ECHO = "import sys\nfor line in sys.stdin:\n    print(int(line) * 2)\n"


def sample(program: str | None, reference: str) -> Sample:
    return Sample(
        domain="mbpp", task_index=7, prompt="",
        response="no code" if program is None else f"So:\n```python\n{program}\n```\nDone.",
        reference=reference, reward=0.0, reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=5,
        metrics={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def code() -> CodeReward:
    return CodeReward(CodeArgs(memory_mib=128, cpu_s=1, timeout_s=10))


def flags(scored: Scored) -> set[str]:
    assert set(scored.notes) == {"compiled", "timeout", "memory", "crashed"}
    return {name for name, value in scored.notes.items() if value}


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("program", "reference", "passed", "expected"),
    [
        (ADD, ASSERTS, 2 / 3, {"compiled"}),
        (ECHO, DOUBLE, 1.0, {"compiled"}),
        ("print(int(input()) * 2)", DOUBLE, 0.5, {"compiled"}),
        (ADD, '{"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, [7]]}', 1.0, {"compiled"}),
        (SWAP, '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[1, 2]]}', 1.0, {"compiled"}),
        (ADD, FILE, 0.5, {"compiled"}),
        (ADD, "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(add(1, 1), "
        "2)", 1.0, {"compiled"}),
        (ADD, "def check(f):\n    assert f(1, 1) == 2\ncheck(add)", 1.0, {"compiled"}),
        (ADD, CLASSES, 0.5, {"compiled"}),
        (RAISES, PYTEST, 0.6, {"compiled"}),
        (None, ASSERTS, 0.0, set()),
        ("def add(a, b) return", ASSERTS, 0.0, set()),
        ("raise RuntimeError", ASSERTS, 0.0, {"compiled", "crashed"}),
        ("x = bytearray(1 << 30)", ASSERTS, 0.0, {"compiled", "memory"}),
        ("x = bytearray(1 << 30)", DOUBLE, 0.0, {"compiled", "memory"}),
        ("import os; os.abort()", DOUBLE, 0.0, {"compiled", "crashed"}),
        # an end in good order passes nothing
        ("import os; os._exit(0)", ASSERTS, 0.0, {"compiled"}),
        ("print('true'); import os; os.write(3, b'loaded\\n0 0 true\\n0 1 true\\n'); "
        "exit()", ASSERTS, 0.0, {"compiled", "crashed"}),
        (ECHO + "exit()", DOUBLE, 1.0, {"compiled"}),
        (ECHO + "exit(1)", DOUBLE, 0.0, {"compiled", "crashed"}),
        (DEEP, ASSERTS, 2 / 3, {"compiled"}),
        (f"{STUBBORN}while True: pass", ASSERTS, 0.0, {"compiled", "timeout"}),
        (f"{STUBBORN}def add(a, b):\n    while True: pass", ASSERTS, 0.0, {"compiled", "timeout"}),
        (f"{STUBBORN}while True: pass", DOUBLE, 0.0, {"compiled", "timeout"}),
        ("def add(a, b): return bytearray(1 << 30)", ASSERTS, 0.0, {"compiled", "memory"}),
        ("import os\ndef add(a, b): os.abort()", ASSERTS, 0.0, {"compiled", "crashed"}),
    ],
)  # fmt: skip
def test_outcomes(
    code: CodeReward, program: str | None, reference: str, passed: float, expected: set[str]
) -> None:
    scored = code.score(sample(program, reference))
    assert scored.value == passed
    assert flags(scored) == expected


@pytest.mark.sandbox
def test_a_program_that_takes_too_long_keeps_what_it_had_passed() -> None:
    code = CodeReward(CodeArgs(timeout_s=0.7))
    for reference in (
        json.dumps(["assert add(1, 2) == 3", "import time; time.sleep(60)"]),
        '{"inputs": ["1", "60"], "outputs": ["2", "1"]}',
    ):
        scored = code.score(
            sample(
                ADD
                + "if __name__ == '__main__':\n    n = int(input()); import time; time.sleep(n - 1); print(2)",
                reference,
            )
        )
        assert scored.value == 0.5
        assert flags(scored) == {"compiled", "timeout"}


@pytest.mark.sandbox
def test_a_program_that_hides_its_outputs_is_ended_in_time_too() -> None:
    scored = CodeReward(CodeArgs(timeout_s=0.7)).score(
        sample("import os, time\nos.close(1); os.close(2); time.sleep(600)", DOUBLE)
    )
    assert scored.value == 0.0
    assert flags(scored) == {"compiled", "timeout"}


@pytest.mark.sandbox
def test_packages_can_be_imported_by_programs_and_tests(tmp_path: Path) -> None:
    (tmp_path / "ours.py").write_text("def twice(x): return 2 * x\n")
    tmp_path.chmod(0o755)
    code = CodeReward(CodeArgs(packages=(str(tmp_path),)))
    program = "import ours\ndef add(a, b): return ours.twice(a + b)"
    assert (
        code.score(
            sample(program, json.dumps(["import ours\nassert add(1, 2) == ours.twice(3)"]))
        ).value
        == 1.0
    )
    assert (
        code.score(
            sample(
                "import ours\nprint(ours.twice(int(input())))",
                '{"inputs": ["2"], "outputs": ["4"]}',
            )
        ).value
        == 1.0
    )


@pytest.mark.sandbox
def test_all_or_nothing() -> None:
    code = CodeReward(CodeArgs(all_or_nothing=True))
    assert code.score(sample(ADD, ASSERTS)).value == 0.0
    assert code.score(sample(ECHO, DOUBLE)).value == 1.0


@pytest.mark.sandbox
def test_bad_tests_are_the_datas_fault_and_named(code: CodeReward) -> None:
    with pytest.raises(
        InvalidScoreError,
        match=r"domain 'mbpp', task 7, its tests: test 1 is not valid Python: .*'assertt f",
    ):
        code.score(sample(ADD, '["assertt f(1)"]'))


@pytest.mark.sandbox
def test_a_sandbox_that_fails_is_no_zero(code: CodeReward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code._sandbox, "_bwrap", "/bin/false")
    with pytest.raises(SandboxFailed):
        code.score(sample(ADD, ASSERTS))


def test_none_runs_with_limits_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    code = CodeReward(CodeArgs(sandbox="none", memory_mib=128))
    assert "UNSAFE" in caplog.text
    assert code.score(sample(ADD, ASSERTS)).value == 2 / 3
    assert flags(code.score(sample("x = bytearray(1 << 30)", ASSERTS))) == {"compiled", "memory"}


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("", "there are no tests"),
        ("[]", "0 tests"),
        ("[1]", "a list must hold either"),
        ("{", "not JSON"),
        ('{"inputs": ["1"]}', "needs the lists inputs and outputs"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs, but 0 outputs"),
        ('{"inputs": [1], "outputs": ["1"]}', "a text or a list of lines, got 1"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', "lists of arguments, got '1'"),
        ('{"inputs": [], "outputs": [], "fn_name": "a b"}', "not a function name"),
        ("def f(:", "the test file is not valid Python"),
        (
            "def check(f):\n    assert f(1) == 2\n",
            "has no test_. function, no class of tests, and runs nothing itself",
        ),
        (
            "import unittest\nclass Case:\n    def test_a(self): f()\nif __name__ == '__main__': unittest.main()",
            "runs nothing itself",
        ),
        (
            "def test_a(tmp_path): f()",
            "test_a takes arguments; fixtures and parametrize are not supported",
        ),
        (
            '["assert eval(f(1)) == 2"]',
            "they use eval, so a program's results would run inside its tests",
        ),
        (
            '["assert sum([1, 2]) == 3", "assert math.isclose(abs(1), 1)"]',
            "they use no name of the program",
        ),
    ],
)
def test_malformed_tests(reference: str, problem: str) -> None:
    with pytest.raises(InvalidTestsError, match=problem):
        parse(reference)


def test_forms() -> None:
    assert parse('["assert f(1)"]') == StatementTests("", ("assert f(1)",))
    assert (
        parse('[{"input": "1", "output": "2"}]')
        == parse('{"inputs": ["1"], "outputs": ["2"]}')
        == StdioTests(("1",), ("2",))
    )
    assert parse('{"fn_name": "f", "inputs": [[1]], "outputs": [2]}') == FunctionCallTests(
        "f", ("[1]",), (2,)
    )


@pytest.mark.parametrize(
    ("response", "block"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nand\n```py\nb\n\nc\n```", "b\n\nc\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na", None),
        ("```python\na\n```\n```python\nb", "a\n"),
        ("none", None),
    ],
)
def test_the_last_closed_block_is_the_program(response: str, block: str | None) -> None:
    assert last_block(response) == block


def test_outputs_are_compared_line_by_line() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output("1 2", "1\n2")
    assert not same_output("", "0")


@pytest.mark.parametrize(
    ("args", "key"),
    [({"sandbox": "off"}, "sandbox"), ({"timeout_s": 0}, "timeout_s"), ({"cpu": 1}, "cpu")],
)
def test_arguments_are_checked(args: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"args.{key}"):
        loading.check("code", args)


@pytest.mark.parametrize(
    ("thinking", "response", "runs"),
    [
        ("drop", "<think>\n```\nprint(2)\n```</think>\nI give up", False),
        ("drop", "<think>\n```\nprint(2)\n```", False),
        ("drop", "<think>no</think>\n```\nprint(2)\n```", True),
        ("required", "```\nprint(2)\n```", False),
        ("keep", "<think>\n```\nprint(2)\n```", True),
    ],
)
def test_a_program_in_the_thinking_does_not_count(thinking: str, response: str, runs: bool) -> None:
    reward = CodeReward(CodeArgs(sandbox="none", thinking=thinking))
    turn = msgspec.structs.replace(
        sample(None, '{"inputs": [""], "outputs": ["2"]}'), response=response
    )
    assert reward.score(turn).value == float(runs)
