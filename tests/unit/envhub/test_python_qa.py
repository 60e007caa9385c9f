"""The Python tool: programs in the real sandbox, names that stay defined, output that is cut and
says so, answers as numbers.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from broker.errors import ConfigError, UserError
from envhub.envs.tools import python_qa
from envhub.envs.tools.python_qa import PythonArgs, PythonQA, bare, same


def asked(folder: Path, **args: object) -> PythonQA:
    file = folder / "questions.jsonl"
    file.write_text(
        '{"question": "6 * 7?", "answer": "42"}\n{"question": "1 + 1?", "answer": "2"}\n'
    )
    env = PythonQA(PythonArgs.model_validate({"path": str(file), **args}))
    env.reset(0, "train", 0)
    return env


@pytest.mark.sandbox
def test_a_program_runs_in_the_sandbox_and_names_stay_defined(tmp_path: Path) -> None:
    env = asked(tmp_path, format_penalty=0.5, max_programs=4)
    first = env.step("Let me see. <python>```python\nx = 6\nprint('six')\n```</python>")
    assert (first.observation.text, first.reward, first.done, first.valid) == (
        "<output>\nsix\n</output>",
        0.0,
        False,
        True,
    )
    assert (
        env.step(
            '<tool_call>{"name": "python", "arguments": {"code": "print(x * 7)"}}</tool_call>'
        ).observation.text
        == "<output>\n42\n</output>"
    )
    failed = env.step("<python>y = 1\nraise ValueError('no')").observation.text
    assert "ValueError: no" in failed
    assert failed.endswith("(the program ended by exit code 1)\n</output>")
    # what failed is not kept
    assert "NameError" in env.step("<python>print(y)</python>").observation.text
    assert (
        env.step("<python>print(1)</python>").observation.text
        == "<output>No more programs are run.</output>"
    )
    nothing = env.step("hm")
    assert (nothing.reward, nothing.valid, nothing.metrics) == (-0.5, False, {"programs": 4.0})
    last = env.step("<answer>42.0</answer>")
    assert (last.reward, last.done, last.success) == (1.0, True, True)


@pytest.mark.sandbox
def test_a_program_cannot_leave_the_sandbox_nor_run_on(tmp_path: Path) -> None:
    env = asked(tmp_path, timeout_s=1.0, keep=False)
    out = tmp_path / "written"
    assert "Error" in env.step(f"<python>open({str(out)!r}, 'w')</python>").observation.text
    assert not out.exists()
    assert (
        "(the program ended by its time was up)"
        in env.step("<python>import time; time.sleep(30)</python>").observation.text
    )
    env.step("<python>z = 1</python>")
    assert "NameError" in env.step("<python>print(z)</python>").observation.text


def test_long_output_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(stdout=b"x" * 50, stderr=b"", killed_for="", exit_code=0)
    sandbox = SimpleNamespace(run=lambda program: ended)
    monkeypatch.setattr(
        python_qa, "_sandbox", lambda args: (sandbox, python_qa.threading.Semaphore(1))
    )
    assert (
        asked(tmp_path, output_chars=8).step("<python>1</python>").observation.text
        == "<output>\nxxxxxxxx\n(cut: it printed 50 characters)\n</output>"
    )
    ended.stdout = b""
    assert (
        asked(tmp_path).step("<python>1</python>").observation.text
        == "<output>\n(nothing was printed)\n</output>"
    )


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("42", "42.0", True),
        ("$1,234.50", "1234.5", True),
        ("-5", "5", False),
        ("3.1415926", "3.1415927", True),
        ("3.14", "3.15", False),
        (" Red  Hat", "red hat", True),
        ("nan", "nan", True),
        ("", "0", False),
    ],
)
def test_answers_are_compared_as_numbers_where_they_are(
    answer: str, reference: str, right: bool
) -> None:
    assert same(answer, reference) is right


def test_fences_within_the_tag_are_taken_off() -> None:
    assert bare("```python\nx = 1\n```") == bare("```\nx = 1") == bare("x = 1") == "x = 1"


def test_without_a_sandbox_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    python_qa._sandbox.cache_clear()
    with pytest.raises(UserError, match="there is no bubblewrap"):
        PythonQA.check(asked(tmp_path, memory_mib=512).args)
    with pytest.raises(ConfigError, match="there is no such file"):
        PythonQA.check(PythonArgs(path="none.jsonl"))
