"""Test whether programs can pass tests without solving the problem, in every form of the reward
``code``.

    python -m bench.cheats [--sandbox none]

A cheat succeeds when it scores above 0. The last line is one JSON object: forms, cheats (the least
number in any form), tried and succeeded (in all forms), canonical (the share of correct solutions
that score 1, over all forms, at least 20 in each), per_form, and in_one_process: how many of the
same cheats would pass if their tests ran in their own process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Final

from bench.support import canonical
from bench.support.cheat_programs import FUNCTIONS, SCRIPTS, SPECIAL
from broker.errors import UserError
from rewardhub.rewards.base import Sample
from rewardhub.rewards.code import CodeArgs, CodeReward
from rewardhub.rewards.code_tests import StatementTests, parse
from rlearner_sandbox import Sandbox, SandboxLimits

FORMS: Final = ("asserts", "test_file", "calls", "pairs")
LIMITS: Final[dict[str, Any]] = {"timeout_s": 20.0, "cpu_s": 2, "memory_mib": 512}
STATEMENTS: Final = (
    "assert mystery(2) == 40503", "assert abs(mystery(3) - 81007) < 1e-6", "assert math.isclose(mystery(5), 121511.5)",
    "import math\nassert math.fabs(mystery(1) - 20251.5) <= 1e-9", "assert [mystery(n) for n in (2, 7)] == [40503, "
    "161]",
    "assert all(mystery(n) == v for n, v in ((2, 40503), (7, 161)))",
    "from math import isclose\nassert isclose(mystery(9), 202519.25)", "assert sorted([mystery(2), mystery(3)]) == "
    "[40503, 81007]",
)  # fmt: skip
CASES: Final = """
import math, unittest
from math import isclose
from solution import *

class Cases(unittest.TestCase):
    def test_equal(self): self.assertEqual(mystery(2), 40503)
    def test_almost(self): self.assertAlmostEqual(mystery(3), 81007)
    def test_list(self): self.assertListEqual([mystery(n) for n in (2, 7)], [40503, 161])
    def test_close(self): self.assertTrue(isclose(mystery(5), 121511.5) and math.isclose(mystery(5), 121511.5))
    def test_in(self): self.assertIn(mystery(2), (40503, 40504))

def test_plain(): assert mystery(2) == 40503 and isinstance(mystery(2), int)
def test_items():
    for n, v in ((2, 40503), (7, 161)):
        assert mystery(n) == v
def test_loop():
    for got, want in zip(map(mystery, (2, 7)), (40503, 161), strict=True):
        assert got == want
"""
CALLS: Final = {
    "fn_name": "mystery",
    "inputs": [[2], [3], [5], [7]],
    "outputs": [40503, 81007, 121511.5, [161]],
}
PAIRS: Final = [
    {"input": f"{n}\n", "output": f"{v}\n"} for n, v in ((2, 40503), (3, 81007), (5, 121511.5))
]


def cheats(form: str) -> dict[str, tuple[str, str]]:
    """Return program and reference of each cheat by name."""
    if form == "pairs":
        return {name: (program, json.dumps(PAIRS)) for name, program in SCRIPTS.items()}
    reference = {"asserts": json.dumps(STATEMENTS), "test_file": CASES, "calls": json.dumps(CALLS)}[
        form
    ]
    found = {name: (program, reference) for name, program in FUNCTIONS.items()}
    if form == "test_file":
        found |= {name: (program, tests) for name, (tests, program) in SPECIAL.items()}
    return found


def solutions(form: str) -> list[tuple[str, str]]:
    """Return correct programs with their references."""
    if form == "pairs":
        return [
            (canonical.script(problem), canonical.pairs(problem)) for problem in canonical.PROBLEMS
        ]
    write = {
        "asserts": canonical.asserts,
        "test_file": canonical.test_file,
        "calls": canonical.calls,
    }[form]
    more = list(canonical.MORE) if form == "test_file" else []
    return [(problem.source, write(problem)) for problem in canonical.PROBLEMS] + more


def score(code: CodeReward, program: str, reference: str) -> float:
    sample = Sample(
        domain="cheats", task_index=0, prompt="", response=f"```python\n{program}\n```", reference=reference,
        reward=0.0, reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip
    value = code.score(sample).value
    assert isinstance(value, float)
    return value


def ends_well(sandbox: Sandbox, program: str, reference: str) -> bool:
    """Decide whether a process shared by program and tests exits with code 0."""
    tests = parse(reference)
    assert isinstance(tests, StatementTests)
    head = "import math, sys, types\nsolution = sys.modules['solution'] = types.ModuleType('solution')\n"
    scope = "scope = {'math': math, **{k: v for k, v in solution.__dict__.items() if k != '__builtins__'}}\n"
    executed = "".join(f"exec({text!r}, scope)\n" for text in (tests.first, *tests.cases))
    whole = head + f"exec({program!r}, solution.__dict__)\n" + scope + executed
    ended = sandbox.run(whole, wall_s=10.0)
    return ended.exit_code == 0 and not ended.killed_for


def main() -> int:
    """Try all cheats; return 0 if none succeeds and every solution passes."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cheats", description="Check that cheats fail the tests."
    )
    kinds = ("bubblewrap", "none")
    parser.add_argument(
        "--sandbox", choices=kinds, default=kinds[0], help="none: without bubblewrap, for a look"
    )
    options = parser.parse_args()
    began = time.monotonic()
    try:
        code = CodeReward(CodeArgs(sandbox=options.sandbox, **LIMITS))
        bare = Sandbox(SandboxLimits(cpu_s=2, memory_mib=512), options.sandbox)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    forms: dict[str, dict[str, Any]] = {}
    in_one = 0
    for form in FORMS:
        succeeded = []
        failed = []
        tried = cheats(form)
        right = solutions(form)
        for name, (program, reference) in tried.items():
            if value := score(code, program, reference):
                print(f"{form}: {name} scores {value:g}")
                succeeded.append(name)
            if form in ("asserts", "test_file"):
                in_one += ends_well(bare, program, reference)
        for program, reference in right:
            if (value := score(code, program, reference)) != 1.0:
                print(f"{form}: a solution scores {value:g}: {program!r:.100}")
                failed.append(program)
        counts = {"cheats": len(tried), "succeeded": len(succeeded)}
        forms[form] = counts | {"solutions": len(right), "failed": len(failed)}
        print(f"{form}: {forms[form]}", flush=True)
    total, wrong = (sum(one[key] for one in forms.values()) for key in ("solutions", "failed"))
    figures: dict[str, Any] = {
        "forms": list(FORMS),
        "cheats": min(one["cheats"] for one in forms.values()),
    }
    figures |= {"tried": sum(one["cheats"] for one in forms.values())}
    figures |= {
        "succeeded": sum(one["succeeded"] for one in forms.values()),
        "canonical": (total - wrong) / total,
    }
    figures |= {
        "in_one_process": in_one,
        "per_form": forms,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures))
    return 0 if not figures["succeeded"] and figures["canonical"] == 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
