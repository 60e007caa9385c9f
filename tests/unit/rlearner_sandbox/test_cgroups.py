"""Finds and fills a delegated cgroup; on a folder that looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlearner_sandbox.providers.base import SandboxSpec
from rlearner_sandbox.providers.namespace import cgroups


def make_tree(folder: Path, *, controllers: str = "cpu memory pids") -> Path:
    """Write a cgroup ``service`` with a member ``hub``."""
    service = folder / "tree" / "service"
    (service / "hub").mkdir(parents=True)
    (service / "cgroup.controllers").write_text(controllers)
    (service / "cgroup.subtree_control").write_text("")
    (folder / "mounts").write_text(f"none {folder / 'tree'} cgroup2 rw 0 0\n")
    (folder / "membership").write_text("4:memory:/elsewhere\n0::/service/hub\n")
    return service


def test_nothing_is_used_that_is_not_delegated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cgroups.VARIABLE, raising=False)
    make_tree(tmp_path)
    assert cgroups.delegated_folder(tmp_path / "mounts", tmp_path / "membership") is None


def test_delegated_parent_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cgroups.VARIABLE, raising=False)
    service = make_tree(tmp_path)
    monkeypatch.setattr(cgroups, "_is_delegated", lambda folder: folder == service)
    assert cgroups.delegated_folder(tmp_path / "mounts", tmp_path / "membership") == service


def test_named_folder_needs_the_controllers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_tree(tmp_path, controllers="cpu io")
    monkeypatch.setenv(cgroups.VARIABLE, str(service))
    assert cgroups.delegated_folder() is None
    (service / "cgroup.controllers").write_text("memory pids")
    assert cgroups.delegated_folder() == service


def test_limits_of_a_sandbox(tmp_path: Path) -> None:
    spec = SandboxSpec(memory_mib=64, cpus=0.5, processes=10)
    folder = cgroups.make_cgroup(tmp_path, "sandbox-1", spec)
    values = {path.name: path.read_text() for path in folder.iterdir()}
    assert values == {
        "memory.max": str(64 << 20),
        "memory.swap.max": "0",
        "pids.max": "12",
        "cpu.max": "50000 100000",
    }
