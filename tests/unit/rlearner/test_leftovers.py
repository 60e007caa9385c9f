"""What a failed start leaves: nothing of its own, and all of others'."""

from contextlib import suppress
from pathlib import Path

import pytest

from broker.errors import UserError
from broker.runtime.process import Stopped
from learner.run_folder import note_epoch
from rlearner.cli import main
from rlearner.ops.folder_cleanup import removed_on_failure


def start(folder: Path, problem: str, held: bool) -> None:
    with removed_on_failure(folder):
        (folder / "logs").mkdir()
        (folder / "logs" / "learner.log").write_text("x")
        if held:
            note_epoch(folder, 1, "")
        raise UserError(problem)


def fail(folder: Path, problem: str = "train.lr: no", *, held: bool = False) -> None:
    with pytest.raises(UserError):
        start(folder, problem, held)


def test_what_it_made_is_removed_with_the_folders_above(tmp_path: Path) -> None:
    fail(tmp_path / "runs" / "deep" / "a")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other").write_text("")
    fail(tmp_path / "runs" / "a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_what_was_there_or_is_needed_stays(tmp_path: Path) -> None:
    old, held, pointed = tmp_path / "old", tmp_path / "held", tmp_path / "pointed"
    old.mkdir()
    fail(old)
    fail(held, held=True)
    fail(pointed, f"envhub died (see {pointed}/logs/envhub.log)")
    assert [(path / "logs" / "learner.log").exists() for path in (old, held, pointed)] == [
        True,
        True,
        True,
    ]
    with removed_on_failure(tmp_path / "fine"):
        (tmp_path / "fine" / "config.yaml").write_text("")
    assert (tmp_path / "fine").is_dir()


def test_what_another_process_made_at_the_same_time_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, exists = tmp_path / "a", Path.exists

    def looked(path: Path) -> bool:
        there = exists(path)
        folder.mkdir(exist_ok=True)  # by the other one, right behind our look
        return there

    monkeypatch.setattr(Path, "exists", looked)
    fail(folder)
    assert (folder / "logs" / "learner.log").is_file()


def test_a_start_that_was_stopped_before_it_wrote_anything_leaves_no_empty_folder(
    tmp_path: Path,
) -> None:
    with suppress(Stopped), removed_on_failure(tmp_path / "runs" / "a"):
        raise Stopped("SIGINT")
    assert list(tmp_path.iterdir()) == []


def test_up_that_cannot_start_its_broker_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.server.private_server.find_binary", refuse)
    assert (
        main(["up", "configs/quickstart.yaml", f"run.dir={tmp_path / 'runs'}", "run.name=a"]) == 2
    )
    assert list(tmp_path.iterdir()) == []


def refuse(binary: str | None = None) -> str:
    raise UserError("no nats-server found")
