"""`rlearner runs` and `rlearner draw`, on folders of runs whose brokers are gone."""

import json
from pathlib import Path

import pytest
import yaml

from learner.run_folder import note_broker, note_epoch
from rlearner.cli import main
from rlearner.evaluate.cli import with_own_run_name
from rlearner.ops.listing import format_age, size_text
from rlearner.up.run_claim import RunClaim

DEAD = "nats://127.0.0.1:9"


def made(root: Path, name: str, step: int, *, broker: str = "", steps: int = 3) -> Path:
    folder = root / name
    (folder / "broker" / "jetstream").mkdir(parents=True)
    (folder / "broker" / "jetstream" / "1.blk").write_bytes(b"x" * 100_000)
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"run": {"name": name}, "train": {"steps": steps}})
    )
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(1, step + 1)))
    for kept in ("demos.jsonl", "demos.log", "epoch.new"):
        (folder / kept).write_text("x")
    if broker:
        note_broker(folder, broker)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made(tmp_path, "done", 3, broker=DEAD)
    made(tmp_path, "half", 2)
    (made(tmp_path, "measured", 0) / "result.json").write_text("{}")
    made(tmp_path, "away", 1, broker=DEAD)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("train: [")
    (tmp_path / "broker").mkdir()  # of `broker serve`, no run
    return tmp_path


def test_each_run_with_its_state(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunClaim(made(root, "begun", 0), "begun"):
        assert main(["runs", str(root), "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
    found = {
        run["name"]: (run["state"], run["step"], run["steps"]) for run in json.loads(line)["runs"]
    }
    assert found == {
        "away": ("broker away", 1, 3),
        "begun": ("starting", 0, 3),
        "broken": ("unreadable", 0, 0),
        "done": ("finished", 3, 3),
        "half": ("stopped", 2, 3),
        "measured": ("evaluation", 0, 3),
    }
    assert all(
        run["size_bytes"] > 100_000 for run in json.loads(line)["runs"] if run["name"] != "broken"
    )
    assert main(["runs", str(root)]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines() if "measured" not in row]
    assert rows[0] == ["run", "state", "steps", "size", "last", "change"]
    assert rows[-1][:3] == ["half", "stopped", "2/3"]


def test_a_long_name_is_whole_where_nobody_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "n" * 64
    made(tmp_path, name, 1)
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == [name, "stopped", "1/3"]


def test_prune_deletes_what_can_go_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def there() -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    before, gone = (
        there(),
        {
            "done/demos.log",
            "done/epoch.new",
            "done/broker/jetstream/1.blk",
            "half/demos.log",
            "half/epoch.new",
        },
    )
    gone |= {"measured/demos.log", "measured/epoch.new", "measured/broker/jetstream/1.blk"}
    assert main(["runs", str(root), "--prune"]) == 2
    assert (
        capsys.readouterr().err
        == "error: --prune: needs a confirmation; add --yes, or run it in a terminal\n"
    )
    assert there() == before
    assert main(["runs", str(root), "--prune", "--json"]) == 0  # only tells
    told = json.loads(capsys.readouterr().out)
    assert (told["deleted"], there()) == (False, before)
    assert {str(Path(one["path"]).relative_to(root)) for one in told["removable"]} == {
        *(name for name in gone if "broker" not in name),
        "done/broker",
        "measured/broker",
    }
    with RunClaim(root / "half", "half"):  # at work
        before |= {"half/.lock"}
        assert main(["runs", str(root), "--prune", "--yes"]) == 0
        assert before - there() == {name for name in gone if not name.startswith("half/")}
        assert not (root / "done" / "broker").exists()
    assert main(["runs", str(root), "--prune", "--yes"]) == 0
    assert before - there() == gone
    capsys.readouterr()
    assert main(["runs", str(root), "--prune"]) == 0
    assert capsys.readouterr().out == "nothing to delete\n"


def test_a_folder_that_is_none_and_figures_for_people(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", str(tmp_path / "no")]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path / 'no'}: no such folder; name the folder that holds the runs\n"
    )
    assert [size_text(n) for n in (0, 3 << 19, 5 << 29)] == ["0.0 MiB", "1.5 MiB", "2.5 GiB"]
    assert [format_age(n) for n in (3, 119, 600, 7200, 400_000)] == [
        "3 s",
        "119 s",
        "10 min",
        "2 h",
        "5 days",
    ]


def test_draw_makes_the_pictures_of_a_run_started_by_hand(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draw", "half", "--dir", str(root)]) == 0
    assert capsys.readouterr().out == f"{root / 'half' / 'reward.png'}\n"
    assert (root / "half" / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert main(["draw", "half", "--dir", str(root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": "half",
        "files": [str(root / "half" / "reward.png")],
    }
    (root / "half" / "metrics.jsonl").write_text("")
    assert main(["draw", "half", "--dir", str(root)]) == 2
    assert (
        capsys.readouterr().err
        == "error: run half has made no step yet, so there is nothing to draw\n"
    )


def test_an_evaluation_gets_a_folder_of_its_own(root: Path) -> None:
    """The settings and the streams of a trained run are in the folder of its name."""
    config = {"run": {"name": "done", "dir": str(root), "seed": 4}}
    assert with_own_run_name(config, str(root / "done")) == config
    note_epoch(root / "done", 1, "")
    run = with_own_run_name(config, str(root / "done"))["run"]
    assert run == {"name": run["name"], "dir": str(root), "seed": 4}
    assert run["name"].startswith("eval-done-")
    assert with_own_run_name({"run": {}}, "configs/quickstart.yaml")["run"]["name"].startswith(
        "eval-quickstart-"
    )
