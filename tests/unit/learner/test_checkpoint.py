"""Checkpoints: whole or not there, found in order, pruned from the oldest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import FakeBackend

from broker.errors import UserError
from learner.backends.parts.hugging_face import StoredModel
from learner.checkpoints import checkpoint
from learner.credit.ledger import GroupArrival, Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules


class Stub(FakeBackend):
    """As much of a backend as a checkpoint needs."""

    broken = False

    def describe(self, path: Path) -> StoredModel:
        if self.broken:
            raise RuntimeError("the disk is full")
        return super().describe(path)


def ledger_at(step: int) -> dict[str, Any]:
    rules = TicketRules(
        steps=12,
        groups_per_step=1,
        max_staleness=1,
        on_late="wait",
        seed=0,
        domains=(DomainRule("lake", 1.0, 2, 2, 1.0),),
    )
    ledger = Ledger(rules)
    ledger.open_credit()
    for seq in range(1, step + 1):
        ledger.apply(GroupArrival(seq, ledger.ticket(seq).min_version, (0.0, 1.0)), seq)
        ledger.complete_step()
    return ledger.dump()


def test_written_found_and_loaded(tmp_path: Path) -> None:
    folder, backend = tmp_path / "checkpoints", Stub()
    assert checkpoint.newest_checkpoint(folder) is None
    for step in (2, 10):
        path = checkpoint.write_checkpoint(folder, backend, ledger_at(step), epoch=3)  # type: ignore[arg-type]
        assert path == folder / f"step-{step:06d}"
    found = checkpoint.newest_checkpoint(folder)
    assert found is not None
    assert (found.path, found.step, found.epoch, found.ledger) == (
        folder / "step-000010",
        10,
        3,
        ledger_at(10),
    )
    checkpoint.load_state(found, backend)  # type: ignore[arg-type]
    assert {name: tensor.tolist() for name, tensor in backend.loaded.items()} == {
        "optimizer.step": [7]
    }
    assert (found.path / "config.json").read_text() == "{}"


def test_the_same_step_is_replaced(tmp_path: Path) -> None:
    checkpoint.write_checkpoint(tmp_path, Stub(), ledger_at(1), epoch=1)  # type: ignore[arg-type]
    checkpoint.write_checkpoint(tmp_path, Stub(), ledger_at(1), epoch=2)  # type: ignore[arg-type]
    assert [
        checkpoint.read_checkpoint(path).epoch for path in checkpoint.list_checkpoints(tmp_path)
    ] == [2]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    backend = Stub()
    backend.broken = True
    with pytest.raises(RuntimeError, match="the disk is full"):
        checkpoint.write_checkpoint(tmp_path, backend, ledger_at(1), epoch=1)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_pruned_from_the_oldest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.write_checkpoint(tmp_path, Stub(), ledger_at(step), epoch=1)  # type: ignore[arg-type]
    (tmp_path / "step-notes").mkdir()
    assert [path.name for path in checkpoint.prune_checkpoints(tmp_path, 2)] == [
        "step-000003",
        "step-000004",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000003",
        "step-000004",
        "step-notes",
    ]
    assert [path.name for path in checkpoint.prune_checkpoints(tmp_path, 5)] == [
        "step-000003",
        "step-000004",
    ]


@pytest.mark.parametrize("body", ["", "[]", "not json", json.dumps({"format": 99})])
def test_an_unreadable_one_is_named(tmp_path: Path, body: str) -> None:
    path = checkpoint.write_checkpoint(tmp_path, Stub(), ledger_at(1), epoch=1)  # type: ignore[arg-type]
    (path / "learner" / "learner.json").write_text(body)
    with pytest.raises(UserError, match=r"learner\.json: (cannot be read|format)"):
        checkpoint.newest_checkpoint(tmp_path)


def test_what_a_killed_learner_left_half_written_is_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.write_checkpoint(folder, Stub(), ledger_at(2), epoch=1)  # type: ignore[arg-type]
    for name in (".step-000004.abcd", ".step-000002.old.efgh"):
        (folder / name / "learner").mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"half")
    checkpoint.remove_partial(folder)
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    checkpoint.remove_partial(tmp_path / "nothing")
