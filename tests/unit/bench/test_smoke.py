"""The small forms of the benches: which there are, and what counts as a failure."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import smoke
from bench.scale.__main__ import MEASUREMENTS
from bench.support.smoke_cases import CASES, ROOT, TESTED, SmokeCase

CASE = SmokeCase("bench.codec", ("rate", "rows"))


def named_benches() -> set[str]:
    """Return the modules below bench/ that docs/performance.md names; parts of bench.gpu are its
    steps.
    """
    found = re.findall(
        r"python -m (bench\.[a-z_.]+[a-z])", (ROOT / "docs" / "performance.md").read_text()
    )
    return {"bench.gpu" if name.startswith("bench.gpu.") else name for name in found}


def test_every_published_bench_has_a_small_form_or_a_test() -> None:
    small = {case.module for case in CASES}
    assert named_benches() == small | TESTED.keys()
    assert not small & TESTED.keys()
    assert [test for test in TESTED.values() if not (ROOT / test).is_file()] == []


def test_every_measurement_of_scale_has_a_small_form() -> None:
    assert {case.arguments[-1] for case in CASES if case.module == "bench.scale"} == set(
        MEASUREMENTS
    )


@pytest.mark.parametrize("place", sorted({place for case in CASES for place in case.constants}))
def test_constants_of_small_forms_exist(place: str) -> None:
    """Read from the source: importing all of them takes a minute."""
    module, _, constant = place.partition(":")
    tree = ast.parse(Path(ROOT, *module.split(".")).with_suffix(".py").read_text())
    names = set[str]()
    for node in tree.body:
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    assert constant in names


@pytest.mark.parametrize(
    ("exit_code", "printed", "failure"),
    [
        (0, 'words\n{"rate": 1, "rows": [], "more": 2}\n', ""),
        (1, '{"rate": 1, "rows": []}', "exit code 1; must be 0"),
        (-9, "", "exit code -9; must be 0"),
        (0, "", "the last line is no JSON object"),
        (0, "rate 1", "the last line is no JSON object"),
        (0, '["rate", "rows"]', "no key rate, rows in its last line"),
        (0, '{"rate": 1}', "no key rows in its last line"),
    ],
)
def test_failures_of_a_bench(exit_code: int, printed: str, failure: str) -> None:
    assert smoke.find_failure(CASE, exit_code, printed) == failure


def test_unknown_bench_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke.main(["nothing"]) == 2
    assert "error: no bench 'nothing'; there are codec, " in capsys.readouterr().err


def test_bench_that_fails_is_named_and_one_that_cannot_run_is_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SmokeCase(
        "bench.codec", ("encode_us", "lost_key"), ("--repeats", "20", "--tokens", "16")
    )
    absent = SmokeCase("bench.bus", (), problem=lambda: "there is no broker")
    monkeypatch.setattr(smoke, "CASES", (broken, absent))
    assert smoke.main([]) == 1
    figures: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["failed"] == {"codec": "no key lost_key in its last line"}
    assert figures["skipped"] == {"bus": "there is no broker"}
    assert figures["benches"] == 1
