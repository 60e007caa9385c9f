"""A learner that was killed (SIGKILL) in the middle, against ``rlearner replay`` over its archive."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench import resume
from learner.checkpoints import checkpoint
from learner.credit import archive
from rlearner.cli import main

STEPS = 7


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose learner was killed once between two checkpoints."""
    folder = tmp_path_factory.mktemp("killed")
    assert asyncio.run(resume.disturbed(folder, STEPS, 1, seed=3)) == 1
    return folder / "runs" / resume.RUN


@pytest.fixture
def copied(killed: Path, tmp_path: Path) -> Path:
    """The same, to be spoilt."""
    return Path(shutil.copytree(killed, tmp_path / "runs" / killed.name))


def replay(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str, str]:
    code = main(["replay", run.name, "--dir", str(run.parent), *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_same_numbers_and_tensors_as_a_run_that_was_killed(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = replay(capsys, killed, "--from", "0", "--to", str(STEPS), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    expected = {
        "run": "resume",
        "from": 0,
        "to": STEPS,
        "steps": STEPS,
        "identical": True,
        "identical_steps": STEPS,
    }
    assert {name: found[name] for name in expected} == expected
    assert found["first_difference"] is None
    assert sorted(found["digests"]) == ["6", "7"]
    assert all(one["replay"] == one["run"] for one in found["digests"].values())


def test_from_the_checkpoint_before(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints are kept of steps 6 and 7: what comes before begins with the first weights."""
    code, out, _ = replay(capsys, killed, "--from", "6", "--to", "7")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].endswith("checkpoints/step-000006 (step 6) to step 7")
    assert lines[1].startswith("step 7: identical: ")
    assert lines[-1] == "identical: 1 steps, and all tensors of checkpoint 7"
    code, out, _ = replay(capsys, killed, "--from", "0", "--to", "1")
    assert code == 0
    assert out.splitlines()[0].endswith("model (step 0) to step 1")


def test_from_a_checkpoint_that_was_pruned(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, with what exists; the beginning is named only while the run can be replayed from
    there.
    """
    pruned = (
        "error: --from 4: no checkpoint of step 4 is kept; there are checkpoints of steps 6, 7; "
    )
    code, out, err = replay(capsys, copied, "--from", "4", "--to", "7")
    assert (code, out, err) == (
        2,
        "",
        pruned + "the run can be replayed from its beginning (--from 0)\n",
    )
    shutil.rmtree(copied / "model")
    code, _, err = replay(capsys, copied, "--from", "4", "--to", "7", "--json")
    gone = f"{copied / 'model'}: the initial weights of the run are missing"
    assert (code, err) == (2, f"{pruned}the beginning cannot be replayed ({gone})\n")


def test_the_first_difference_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = rows(copied)
    assert lines[1]["step"] == 2
    lines[1]["actor/pg_loss"] += 1e-9
    del lines[2]["actor/entropy"]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, _ = replay(capsys, copied, "--from", "0", "--to", "3")
    assert code == 1
    assert out.splitlines()[1].startswith("step 1: identical: ")
    assert out.splitlines()[-1].startswith("DIFFERENT: first at step 2: actor/pg_loss is ")
    assert "step 3: differs: actor/entropy is " in out


def test_other_records_make_a_difference(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two groups of the first step change places: every number says so, the ledger's word first."""
    folder = copied / archive.FOLDER
    found = [frame for frame in archive.read_frames(folder)]
    shutil.rmtree(folder)
    rules, one, two = found[:3]
    swapped = [
        rules,
        archive.ArchiveFrame(one.seq, two.ticket, two.data),
        archive.ArchiveFrame(two.seq, one.ticket, one.data),
        *found[3:],
    ]
    writer = archive.SampleArchive(folder, 0, 1 << 30)
    for frame in swapped:
        writer.append(frame.record(), archive.digest_record(frame.data))
    writer.close()
    code, out, _ = replay(capsys, copied, "--from", "0", "--to", "1", "--json")
    assert code == 1
    assert json.loads(out)["first_difference"]["differences"][0].startswith("made of tickets [")


def test_what_is_not_there_is_said_in_one_line(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = replay(capsys, copied, "--from", "3", "--to", "9")
    assert (code, err) == (
        2,
        f"error: --from 3 --to 9: expected 0 <= from < to <= {STEPS}, as run resume has made\n",
    )
    archive.truncate_after(copied / archive.FOLDER, 13)
    code, _, err = replay(capsys, copied, "--from", "0", "--to", "4")
    assert (code, err.count("\n")) == (2, 1)
    assert "record 14, which step 4 needs, is not in the archive (samples.keep)" in err
    shutil.rmtree(copied / archive.FOLDER)
    code, _, err = replay(capsys, copied, "--from", "0", "--to", "4")
    assert code == 2
    assert err.endswith("no records to replay; a run keeps them with samples.keep=true\n")


def test_a_counterfactual_trains_otherwise_on_the_same_groups(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another learning rate shows from the second step on; in the first, all but the rate itself is
    the run's own, bit for bit.
    """
    out = tmp_path / "faster"
    code, printed, err = replay(
        capsys, killed, "--from", "0", "--to", "3", "--out", str(out), "--json", "train.lr=0.01"
    )
    assert (code, err) == (0, "")
    assert json.loads(printed)["overrides"] == {"train.lr": 0.01}
    run, found = rows(killed)[:3], rows(out)
    assert [line["step"] for line in found] == [1, 2, 3]
    for theirs, ours in zip(run, found, strict=True):
        assert ours["actor/lr"] == pytest.approx(10 * theirs["actor/lr"])
        same = {name for name in ours if name.startswith(("reward/", "staleness/", "actor/num_"))}
        assert len(same) > 6
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}
    differs = [
        {name for name in ours if ours[name] != theirs[name]} - {"actor/lr"}
        for theirs, ours in zip(run, found, strict=True)
    ]
    assert not differs[0]
    assert {"actor/pg_loss", "actor/entropy", "actor/grad_norm"} <= differs[1]
    config = yaml.safe_load((out / "config.yaml").read_text())
    assert (config["run"]["name"], config["run"]["dir"], config["train"]["lr"]) == (
        "faster",
        str(tmp_path),
        0.01,
    )
    assert [path.name for path in checkpoint.list_checkpoints(out / "checkpoints")] == [
        "step-000003"
    ]
    code, _, err = replay(
        capsys, killed, "--from", "0", "--to", "3", "--out", str(out), "train.lr=0.01"
    )
    assert (code, err) == (
        2,
        f"error: --out {out}: already exists; name an empty or a new folder\n",
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.groups_per_step=2",
            "train.groups_per_step: 2 is not allowed; a replay trains on the same data",
        ),
        (
            "algorithm.filter_zero_variance=true",
            "algorithm.filter_zero_variance: True is not allowed; a replay trains on the same data",
        ),
        (
            "domains.lake.group_size=8",
            "domains.lake.group_size: 8 is not allowed; a replay trains on the same data",
        ),
        (
            "algorithm.adv_estimator=remax",
            "algorithm.adv_estimator: 'remax' is not allowed; remax needs greedy episodes",
        ),
    ],
)
def test_what_would_change_the_data_is_refused(
    killed: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = replay(capsys, killed, "--from", "0", "--to", "1", override)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"error: {message}")
