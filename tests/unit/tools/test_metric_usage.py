"""Names of metrics in the code, and the declarations that cover them."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from broker.telemetry.run_metrics import RUN_METRICS
from tools.house import PRODUCT, ROOT
from tools.metric_usage import is_declared, metric_names, undeclared_names


def names_in(code: str) -> set[str]:
    return {name for name, _ in metric_names(ast.parse(code))}


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('values = {"speed/tokens": 1.0}', "speed/tokens"),
        ('values["speed/tokens"] += 1.0', "speed/tokens"),
        ('values = dict.fromkeys(("speed/tokens", "x"), 0.0)', "speed/tokens"),
        ('values |= {f"speed/{name}": 1.0 for name in names}', "speed/*"),
        ('values[f"{prefix}/pace"] = 1.0', "*/pace"),
        ('log("actor/tokens")', "actor/tokens"),
    ],
)
def test_undeclared_name_is_found(code: str, name: str) -> None:
    assert names_in(code) == {name}
    assert not is_declared(name)


@pytest.mark.parametrize(
    "code",
    [
        'folder = "speed/tokens"',
        'is_count = name.startswith("actor/num_")',
        'files = {"etc/rlearner.conf": ""}',
        'log.info("tokens/s and more")',
    ],
)
def test_other_strings_are_no_metrics(code: str) -> None:
    assert names_in(code) == set()


@pytest.mark.parametrize(
    "name",
    ["reward/mean", "reward/*/mean", "env/*", "env/moves", "*/accuracy", "fleet/*", "eval/pass@4"],
)
def test_declared_name_is_covered(name: str) -> None:
    assert is_declared(name)


def test_code_and_declarations_agree() -> None:
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8"))
        for package in PRODUCT
        for file in (ROOT / package).rglob("*.py")
    }
    assert undeclared_names(ROOT, trees) == []
    reporting = [tree for file, tree in trees.items() if is_reporting(file)]
    reported = {name for tree in reporting for name, _ in metric_names(tree)}
    unreported = [metric.name for metric in RUN_METRICS if not is_reported(metric.name, reported)]
    assert unreported == ["step", "policy_version", "time", "frac_reward_zero_std"]


def is_reporting(file: Path) -> bool:
    """Return whether a file may report metrics; readers and the declarations do not count."""
    package = file.relative_to(ROOT).parts[0]
    return package not in {"rlearner", "tools"} and "telemetry" not in file.parts


def is_reported(metric: str, names: set[str]) -> bool:
    """Return whether one of the names in the code may be this metric."""
    return metric in names or any(fnmatchcase(metric, name) for name in names if "*/*" not in name)
