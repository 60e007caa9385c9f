"""A run's folder in place of a configuration file."""

from argparse import Namespace
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from broker.errors import RlearnerError, UserError
from broker.runtime.process import Stopped
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from broker.system.process_identity import this_process
from learner.gpu_selection import forget_gpus, with_ranks
from learner.prepare import name_run, write_config
from learner.run_folder import RunPlace, note_epoch
from rlearner.cli import main
from rlearner.ops.continue_line import continue_line, continue_line_at_exit
from rlearner.up.run_claim import RunClaim


def made(folder: Path, *overrides: str) -> Path:
    """As a learner of that run leaves it."""
    given = ["run.name=first", "run.dir=elsewhere", *overrides]
    write_config(folder, validate(load("configs/quickstart.yaml", given)))
    return folder


def test_its_settings_under_the_name_that_it_has_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(tmp_path / "runs" / "second", "train.steps=7", "train.ticket_timeout_s=5000")
    before = yaml.safe_load((folder / "config.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    for path in ("runs/second", "runs/second/", str(folder)):
        whole = validate(name_run(load(path), path))
        assert (whole["run"]["name"], whole["run"]["dir"]) == ("second", "runs")
        assert {**whole, "run": before["run"]} == before
    monkeypatch.chdir("/")
    assert load(str(folder))["run"]["dir"] == str(tmp_path / "runs").removeprefix("/")


def test_overrides_change_them_and_what_follows_from_them(tmp_path: Path) -> None:
    folder = made(tmp_path / "runs" / "a", "train.ticket_timeout_s=50000")
    before, after = (
        validate(load(str(folder))),
        validate(load(str(folder), ["domains.lake.max_turns=20", "train.lr=1e-5", "run.name=b"])),
    )
    assert (after["train"]["lr"], after["train"]["steps"], after["run"]["name"]) == (1e-5, 40, "b")
    assert after["train"]["ticket_timeout_s"] == 50000
    assert after["domains"]["lake"]["deadline_s"] > before["domains"]["lake"]["deadline_s"] > 0
    algorithm = validate(load(str(folder), ["algorithm=gspo"]))["algorithm"]
    assert algorithm == validate(load("configs/quickstart.yaml", ["algorithm=gspo"]))["algorithm"]


def test_check_takes_it_and_a_folder_without_settings_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "runs" / "a")
    assert main(["check", "--all", str(folder), "train.steps=9"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 9
    assert main(["check", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {tmp_path}: a folder without config.yaml; give a YAML file, or the folder of a run\n"
    )
    (folder / "config.yaml").write_text("train: {stepz: 3}\n")
    with pytest.raises(UserError, match=r"train.stepz: 3 is not allowed"):
        validate(load(str(folder)))


def test_other_gpus_give_other_ranks(tmp_path: Path) -> None:
    settled = {"train": {"steps": 3, "device": "cuda", "ranks": 4}}

    def given(*overrides: str, config: str = str(tmp_path), gpus: str = "0-1") -> Namespace:
        return Namespace(config=config, overrides=list(overrides), gpus=gpus)

    assert with_ranks(forget_gpus(settled, given()), "0-1", 2)["train"] == {
        "steps": 3,
        "device": "cuda",
        "ranks": 2,
    }
    assert forget_gpus(settled, given("train.ranks=4", "train.steps=3"))["train"] == {
        "steps": 3,
        "ranks": 4,
    }
    assert (
        forget_gpus(settled, given(gpus="auto"))
        == forget_gpus(settled, given(config="run.yaml"))
        == settled
    )


def test_the_command_that_goes_on(tmp_path: Path) -> None:
    folder, private = tmp_path / "a b" / "r", "nats://127.0.0.1:40001"
    config = {"run": {"name": "r", "dir": str(tmp_path / "a b")}, "train": {"steps": 40}}
    settings = RunSettings.of_config(config)
    folder.mkdir(parents=True)
    assert continue_line(settings) == ""
    note_epoch(folder, 1, "")
    with RunClaim(folder, "r") as claim:
        claim.note(private)
    assert (
        continue_line(settings)
        == continue_line(settings, private)
        == f"go on with this run: rlearner up '{folder}'\n"
    )
    by_hand = f"go on with this run: rlearner start '{folder}' --broker host:4222\n"
    assert continue_line(settings, "nats://me:secret@host:4222") == by_hand


def test_it_is_said_at_every_end_but_that_of_a_start_that_was_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, broker = (
        {"run": {"name": "a", "dir": str(tmp_path)}, "train": {"steps": 40}},
        "nats://h:4222",
    )
    (tmp_path / "a").mkdir()
    note_epoch(tmp_path / "a", 1, "")

    def said(error: Exception | None, holder: str) -> str:
        with suppress(RlearnerError), continue_line_at_exit(RunSettings.of_config(config), broker):
            note_epoch(tmp_path / "a", 2, holder)
            if error is not None:
                raise error
        return capsys.readouterr().out

    line = f"go on with this run: rlearner start {tmp_path / 'a'} --broker {broker}\n"
    assert [said(None, "other"), said(Stopped("SIGINT"), "other")] == [line, line]
    assert [
        said(UserError("refused, or another one took over"), "other"),
        said(UserError("late"), this_process()),
    ] == [
        "",
        line,
    ]


@pytest.mark.parametrize("name", ["agent", "frozenlake", "gsm8k", "quickstart", "sokoban"])
@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_what_is_left_of_each_shipped_configuration_is_taken_again(
    name: str, algorithm: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n' * 99)
    paths = [f"domains.gsm8k.env_args.path={tmp_path / 'rows.jsonl'}"] if name == "gsm8k" else []
    whole = validate(
        load(name, [f"algorithm={algorithm}", f"run.dir={tmp_path}", "run.name=a", *paths])
    )
    write_config(tmp_path / "a", whole)
    again = validate(load(str(tmp_path / "a")))
    assert {**again, "run": None} == {**whole, "run": None}


def test_a_damaged_folder_is_one_line_and_its_steps_are_unknown(tmp_path: Path) -> None:
    config = validate(load("configs/quickstart.yaml", ["run.name=a"]))
    assert RunPlace("a", tmp_path, config).settings == RunSettings.of_config(config)
    assert RunPlace("a", tmp_path, config).steps == config["train"]["steps"]
    damaged = RunPlace("a", tmp_path, {**config, "train": {"steps": "many"}})
    assert damaged.steps == 0
    with pytest.raises(UserError, match=r"config\.yaml: train\.steps: input should be"):
        _ = damaged.settings
