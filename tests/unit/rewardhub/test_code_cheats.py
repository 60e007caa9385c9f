"""Programs that try to pass tests without solving the problem score nothing in any form; ``python
-m bench.cheats`` tries many more.
"""

from __future__ import annotations

import json

import pytest

from bench.cheats import FORMS, cheats, score, solutions
from bench.support import canonical
from rewardhub.rewards.code import CodeArgs, CodeReward

TRIED = {
    "asserts": (
        "equal_to_everything", "class_for_a_function", "equal_integer", "equal_float", "builtins_replaced",
        "math_shadowed", "math_patched",
        "token_in_frames", "excepthook", "ends_well", "stop_iteration", "assertion_error_gone", "constants_of_callers",
        "frames_of_nonsense",
        "frames_of_its_own", "forks",
    ),
    "test_file": (
        "equal_to_everything", "builtins_shadowed", "unittest_patched", "skip_test", "skip_forged", "pytest_faked",
        "modules_faked",
        "files_beside_the_tests", "imports_for_the_tests", "argument_emptied", "argument_made_equal", "loop_ended",
        "failure_swallowed",
        "everything_in_it", "library_without_import", "module_without_import", "star_import", "skipped",
        "compared_by_the_program",
    ),
    "calls": ("equal_to_everything", "json_patched", "token_in_frames", "answers_by_descriptor", "ends_at_once",
        "not_a_number"),
    "pairs": ("everything", "frames", "stdout_replaced", "descriptors", "forks", "separators", "a_pipe_kept"),
}  # fmt: skip


@pytest.fixture(scope="module")
def code() -> CodeReward:
    return CodeReward(CodeArgs(memory_mib=256, cpu_s=2, timeout_s=60))


@pytest.mark.sandbox
@pytest.mark.parametrize("form", FORMS)
def test_a_cheat_scores_nothing(code: CodeReward, form: str) -> None:
    known = cheats(form)
    assert {name: score(code, *known[name]) for name in TRIED[form]} == dict.fromkeys(
        TRIED[form], 0.0
    )


@pytest.mark.sandbox
@pytest.mark.parametrize("form", FORMS)
def test_a_solution_scores_one(code: CodeReward, form: str) -> None:
    chosen = solutions(form)[FORMS.index(form) : len(canonical.PROBLEMS) : 3]
    assert [score(code, *one) for one in chosen] == [1.0] * len(chosen)


@pytest.mark.sandbox
@pytest.mark.parametrize("number", range(len(canonical.MORE)))
def test_what_json_cannot_say_passes_between_a_program_and_its_tests(
    code: CodeReward, number: int
) -> None:
    assert score(code, *canonical.MORE[number]) == 1.0


def test_there_are_enough_of_them() -> None:
    assert all(len(cheats(form)) >= 20 and len(solutions(form)) >= 20 for form in FORMS)


def test_without_bubblewrap_tests_run_apart_too() -> None:
    code = CodeReward(CodeArgs(sandbox="none"))
    known = cheats("asserts")
    for name in (
        "equal_to_everything",
        "builtins_replaced",
        "excepthook",
        "ends_well",
        "constants_of_callers",
    ):
        assert score(code, *known[name]) == 0.0
    assert score(code, *canonical.MORE[0]) == 1.0


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        # what cannot be passed on costs its own test
        ("def f(x): return x", ["assert f(object()) == 1", "assert f(1) == 1"], 0.5),
        ("class A:\n    x = 1\nclass B(A): pass", ["assert isinstance(B(), A) and B.x == 1", "class C(A): pass\nassert "
        "C"], 0.5),
        ("def f(x): raise x", ["f(1)", "f(ValueError)", "try: f(KeyError)\nexcept KeyError: pass"], 1 / 3),
        ("def f(g): return g(2)", ["assert f(lambda x: x + 1) == 3", "def g(x): raise ValueError('no')\nf(g)"], 0.5),
        ("def f(g):\n    try: g()\n    except ValueError as e: return str(e)", ["def g(): raise "
        "ValueError('no')\nassert f(g) == 'no'"], 1.0),
        ("def f(n): return 'x' * n", ["assert len(f(10)) == 10", "assert len(f(40_000_000)) > 1", "assert f(1) == "
        "'x'"], 2 / 3),
        ("def f(): f.n += 1; return f.n\nf.n = 0", ["assert f() == 1", "assert f() == 2 and f.n == 2"], 1.0),
        ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)", ["assert (V(1) + "
        "V(2)).x == 3", "V(1) + 1"], 0.5),
        ("def f(n):\n    print(n)\n    return 1 / n", ["import io, contextlib\nout = io.StringIO()\nwith "
        "contextlib.redirect_stdout(out):\n    f(2)\n    try: f(0)\n    except ZeroDivisionError: pass\nassert "
        "out.getvalue() == '2\\n0\\n'"], 1.0),
        ("def sum(a, b): return a * b", ["assert sum(2, 3) == 6", "assert sum(2, 3) == 5"], 0.5),
        ("def add(a, b): return a + b", ["assert sum([2, 3]) == 5"], 0.0),
        ("LIMIT = 7\nNAMES = ['a']", ["assert LIMIT == 7 and NAMES == ['a']", "import solution as s\nassert s.LIMIT == "
        "7 and not hasattr(s, 'x')"], 1.0),
    ],
)  # fmt: skip
def test_what_a_test_can_do(program: str, tests: list[str], passed: float) -> None:
    assert (
        score(
            CodeReward(CodeArgs(sandbox="none", timeout_s=60, cpu_s=30)), program, json.dumps(tests)
        )
        == passed
    )


CHANNEL = (
    "import os, stat\nS = [fd for fd in range(3, 20) if os.path.exists(f'/proc/self/fd/{fd}') and "
    "stat.S_ISSOCK(os.fstat(fd).st_mode)]\n"
)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    "program",
    [
        f"{CHANNEL}def f(x):\n    for fd in S: os.close(fd)\n    import time; time.sleep(600)",
        f"{CHANNEL}def f(x):\n    for fd in S: os.write(fd, (30 << 20).to_bytes(4, 'little') + b'[' * 9999)\n    "
        f"import time; time.sleep(600)",
        f"{CHANNEL}def f(x):\n    for fd in S:\n        for _ in range(99): os.write(fd, b'\\x02\\0\\0\\0[]')",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)'])",
        "import os, signal\ndef f(x): os.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nif not os.fork():\n    while True:\n        try: os.fork()\n        except OSError: pass\ndef "
        "f(x): return 1",
        "def f(x): return {n * (2**61 - 1): n for n in range(30000)}",
    ],
)
def test_a_program_that_disturbs_its_tests_scores_nothing_and_fails_nobody(program: str) -> None:
    hub = CodeReward(CodeArgs(memory_mib=128, cpu_s=1, timeout_s=2))
    assert score(hub, program, json.dumps(["assert f(1) == 40503", "assert f(2) == 40504"])) == 0.0
