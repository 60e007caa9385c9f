"""Which runs `rlearner up` refuses before it writes or starts anything."""

import os
from pathlib import Path

import pytest
from bare_checkpoints import write_bare_checkpoint

from broker.contract import wire
from broker.errors import UserError
from broker.settings.run_address import broker_address, private_addresses
from learner.run_folder import note_broker, note_epoch
from rlearner.cli import main
from rlearner.ops.live_learners import FORGOTTEN
from rlearner.up.run_claim import RunClaim, refuse_other_broker

DEAD = "nats://127.0.0.1:9"


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `up` says of that run; it leaves the folder as it is."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert (
        main(
            ["up", "configs/quickstart.yaml", f"run.dir={folder.parent}", f"run.name={folder.name}"]
        )
        == 2
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err


def test_a_folder_has_one_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    shows = f"(`rlearner up`, process {os.getpid()}); `rlearner status {folder}` shows it\n"
    with RunClaim(folder, "a") as claim:
        assert refused(folder, capsys) == f"error: run a is live {shows}"
        claim.note(DEAD)
        assert refused(folder, capsys) == f"error: run a is live at {DEAD} {shows}"
    with RunClaim(folder, "a") as claim:
        note_broker(folder, DEAD)
        assert broker_address(None, folder) == DEAD  # of an earlier life
        claim.note("nats://127.0.0.1:10")
        assert broker_address(None, folder) == "nats://127.0.0.1:10"
    assert broker_address(None, folder) == DEAD
    assert private_addresses(folder) == [DEAD, "nats://127.0.0.1:10"]


@pytest.mark.parametrize("up_before", [False, True])
def test_a_run_of_another_broker_that_does_not_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], up_before: bool
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    note_broker(folder, DEAD)
    note_epoch(folder, 3, "")
    if up_before:  # then it was moved to that broker
        (folder / "broker" / "jetstream").mkdir(parents=True)
        with RunClaim(folder, "a") as claim:
            claim.note("nats://127.0.0.1:10")
    assert refused(folder, capsys) == (
        f"error: run a was last trained with the broker at {DEAD}, which does not answer (Connection refused): "
        f"continue with `rlearner start {folder} --broker {DEAD}` and start the other processes by hand; "
        "if it has lost its store, add --rebase, which counts the open tickets as dead\n"
    )


async def test_a_broker_that_does_not_know_the_run_may_be_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the learner finds out that a store is lost, so nothing else advises --rebase."""

    async def answer(url: str, run: str) -> tuple[list[wire.Presence], str]:
        return [], FORGOTTEN

    monkeypatch.setattr("rlearner.up.run_claim.ask_broker", answer)
    note_broker(tmp_path, DEAD)
    note_epoch(tmp_path, 3, "")
    with pytest.raises(UserError) as refusal:
        await refuse_other_broker(tmp_path, "a")
    assert str(refusal.value) == (
        f"run a was last trained with the broker at {DEAD}, which no longer knows the run: "
        f"continue with `rlearner start {tmp_path} --broker {DEAD}` and start the other processes "
        "by hand"
    )


def test_a_run_that_has_made_more_steps_than_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_bare_checkpoint(tmp_path / "a" / "checkpoints", {"version": 99})
    said = refused(tmp_path / "a", capsys)
    assert said.startswith(
        "error: train.steps: 40 is not allowed; run a has made 99 steps already: give the settings of its start"
    )
