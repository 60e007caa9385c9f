"""What ``rlearner check`` says of a configuration that it accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlearner.cli import main
from rlearner.ops.settings_summary import format_end

QUICK = "configs/quickstart.yaml"


def test_a_run_in_ten_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", QUICK, "--no-trial", "run.name=mine", f"run.dir={tmp_path}"]
    overrides = [
        "algorithm.filter_zero_variance=true",
        "train.max_staleness=2",
        "train.lora.rank=8",
        "domains.lake.rewards=[{name: length, args: {max_tokens: 20, cache_tokens: 5}}]",
        "samples.keep=true",
    ]
    assert main([*words, *overrides]) == 0
    assert (
        capsys.readouterr().out
        == f"""\
run         mine, in {tmp_path}
model       a small generated one (model.path: null), float32
domains     lake (frozenlake, 10 turns, weight 1)
rewards     lake: length
algorithm   grpo, ppo, equal rewards filtered
step        16 groups of 8 episodes, samples at most 2 versions old (older groups wait)
training    40 steps, backend torch, lr 0.001 linear, LoRA of rank 8
rollout     engine hf, 128 requests at once, 256 tokens of context, 256 environments a hub
evaluation  every 10 steps, 256 tasks of lake
kept        checkpoints every 20 steps, all samples
ok
"""
    )


def test_an_offline_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows.write_text(f"{json.dumps({'messages': messages})}\n" * 8)
    config = tmp_path / "sft.yaml"
    config.write_text(f"run: {{name: a, dir: {tmp_path}}}\ndata: {{train: {rows}}}\n")
    assert main(["check", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("run", "pipeline", "model", "data", "training", "kept"),
        "ok",
    ]
    assert lines[3] == f"data        {rows}, held out: a share of the rows"


@pytest.mark.parametrize(
    ("num_missing", "line"),
    [
        (0, "ok"),
        (1, "ok; 1 thing that it needs is missing on this machine"),
        (2, "ok; 2 things that it needs are missing on this machine"),
    ],
)
def test_the_last_line(num_missing: int, line: str) -> None:
    assert format_end(num_missing) == line
