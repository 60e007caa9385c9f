"""``rlearner plan`` as a command: what it refuses, in which words, and what ``--write`` leaves
alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rlearner.cli import main

QUICK = "configs/quickstart.yaml"
Captured = pytest.CaptureFixture[str]


def refused(capsys: Captured, *words: str) -> str:
    """Run a command that must fail; return its only line."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.engine=vllm", "rollout.engine_args.tensor_parallel=abc"],
        ["rollout.engine=vllm", "rollout.engine_args.tensor_parallel=0"],
        ["rollout.engine=vllm", "rollout.engine_args.tensor_parallel=-2"],
        ["rollout.engine=vllm", "rollout.engine_args.gpu_memory_utilization=abc"],
        ["rollout.engine=vllm", "rollout.engine_args.gpu_memory_utilization=7"],
        ["rollout.engine_args.kv_cache_gib=abc"],
        ["rollout.engine_args.tensor_parallel=2"],
        ["rollout.engine=nope"],
        ["train.backend=foo"],
        ["train.backend=torch", "train.ranks=2"],
        ["domains.lake=null"],
    ],
)
def test_wrong_settings_are_refused_as_check_refuses_them(
    capsys: Captured, overrides: list[str]
) -> None:
    line = refused(capsys, "plan", QUICK, "--gpus", "2", *overrides)
    assert line == refused(capsys, "check", QUICK, "--no-trial", *overrides)


def test_a_file_for_offline_training_names_its_command(capsys: Captured) -> None:
    assert "for `rlearner sft`, not for a run" in refused(
        capsys, "plan", "configs/sft.yaml", "--gpus", "2"
    )


def test_more_gpus_than_there_are_anywhere_are_refused(capsys: Captured) -> None:
    line = refused(capsys, "plan", QUICK, "--gpus", "1000000", "--hosts", "1000000")
    assert line == "error: --gpus 1000000: too many; at most 65536\n"


def test_a_file_in_the_way_is_found_before_anything_else(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "fast.yaml"
    file.write_text("")
    for place in (file, file / "below"):
        line = refused(
            capsys, "plan", "no-such-configuration", "--gpus", "2", "--write", str(place)
        )
        assert (
            f"--write {place}: expected a folder, found a file at {file}; name a new folder" in line
        )
    assert "--write '': expected a folder" in refused(
        capsys, "plan", QUICK, "--gpus", "2", "--write", ""
    )


def test_another_plan_is_not_overwritten(capsys: Captured, tmp_path: Path) -> None:
    words = [
        "plan",
        QUICK,
        "--gpus",
        "4",
        "--write",
        str(tmp_path),
        f"run.dir={tmp_path}",
        "run.name=one",
    ]
    assert main(words) == 0
    assert main(words) == 0
    capsys.readouterr()
    before = {file: file.read_text() for file in tmp_path.iterdir()}
    line = refused(capsys, *words, "train.steps=3")
    assert (
        f"{tmp_path}/plan.yaml is of another plan; name another folder, or remove that plan" in line
    )
    assert {file: file.read_text() for file in tmp_path.iterdir()} == before


def test_scripts_that_continue_a_run_say_so(capsys: Captured, tmp_path: Path) -> None:
    words = ["plan", QUICK, "--gpus", "4", f"run.dir={tmp_path}", "run.name=w0", "--write"]
    assert main([*words, str(tmp_path / "new")]) == 0
    assert "run w0 exists" not in capsys.readouterr().err
    (tmp_path / "w0").mkdir()
    assert main([*words, str(tmp_path / "again")]) == 0
    line = f"run w0 exists in {tmp_path}/w0: the scripts continue it; for a new run, set run.name\n"
    assert capsys.readouterr().err.endswith(line)
