"""What the files of the project say about each other: version, typed packages, CI and hooks."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PROJECT["project"]["version"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))


def make_targets() -> set[str]:
    rules = "\n".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "optional.mk")
    )
    return set(re.findall(r"^([a-z][\w-]*):", rules, re.MULTILINE))


def steps_of(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


def test_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(VERSION)} - \d{{4}}-\d\d-\d\d", headings[0])


def test_example_manifests_name_this_version() -> None:
    text = (ROOT / "deploy" / "kubernetes" / "example" / "kustomization.yaml").read_text()
    tags = [image["newTag"] for image in yaml.safe_load(text)["images"]]
    assert tags == [f"{VERSION}-{target}" for target in ("learner", "vllm", "hub")]


def test_every_package_is_typed() -> None:
    packages = PROJECT["tool"]["importlinter"]["root_packages"]
    assert set(packages) <= set(PROJECT["tool"]["mypy"]["packages"])
    assert [name for name in packages if not (ROOT / name / "py.typed").is_file()] == []
    assert PROJECT["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    matrices = [job.get("strategy", {}).get("matrix", {}) for job in workflow["jobs"].values()]
    commands = "\n".join(step.get("run", "") for step in steps_of(workflow))
    called = set(re.findall(r"^make ([\w-]+)", commands, re.MULTILINE))
    called |= {target for matrix in matrices for target in matrix.get("target", [])}
    assert called
    assert called - make_targets() == set()


def test_workflow_of_changes_runs_check_test_and_docs() -> None:
    (path,) = (path for path in WORKFLOWS if path.stem == "check")
    commands = [step.get("run", "") for step in steps_of(yaml.safe_load(path.read_text()))]
    assert {"make check", "make docs"} <= set(commands)
    (test,) = (command for command in commands if command.startswith("make test"))
    assert test in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_may_only_read(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for step in steps_of(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_hooks_run_what_make_check_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    entries = {hook["id"]: hook["entry"] for hook in repository["hooks"]}
    check = (ROOT / "Makefile").read_text(encoding="utf-8").split("\ncheck: setup\n")[1]
    assert "$(BIN)/ruff check ." in check
    assert entries["ruff-check"].startswith(".venv/bin/ruff check")
    assert entries["ruff-format"].startswith(".venv/bin/ruff format")
    assert entries["check"] == "make check"
