"""``rlearner eval`` as a real command: a real fleet measures a model; bad input is refused in one
line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from broker.system.locks import lock
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

LAKE = [
    "envhub.n=16",
    "eval.tasks=6",
    "eval.group_size=2",
    "rollout.num_threads=1",
    "domains.lake.max_turns=3",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = TinyModel(
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        vocab="chars",
    )
    return build_tiny(tmp_path_factory.mktemp("eval") / "model", tiny)


def command(folder: Path, model: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "eval",
        str(model),
        "configs/quickstart.yaml",
        f"run.dir={folder}",
        *arguments,
        "--gpus",
        "cpu",
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=280, check=False)


def test_a_model_is_measured_on_every_task_and_leaves_its_episodes(
    tmp_path: Path, model: Path
) -> None:
    done = command(tmp_path, model, *LAKE, "run.name=measured", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    rows = [
        json.loads(line)
        for line in (tmp_path / "measured/evals/evaluated-step-000000.jsonl")
        .read_text()
        .splitlines()
    ]
    assert [row["task_index"] for row in rows] == list(range(6))
    assert all(len(row["success"]) == 2 for row in rows)
    right = [sum(row["success"]) for row in rows]
    assert (result["tasks"], result["episodes"], result["closed"]) == (6, 12, {})
    assert (
        result["success_rate"]
        == result["avg@2"]
        == result["pass@1"]
        == pytest.approx(sum(right) / 12)
    )
    assert result["pass@2"] == pytest.approx(sum(one > 0 for one in right) / 6)
    assert result["domains"]["lake"]["episodes"] == 12
    assert json.loads((tmp_path / "measured/result.json").read_text()) == result


def test_evaluations_of_one_name_do_not_meet(tmp_path: Path, model: Path) -> None:
    """The second one starts with empty streams; one that would run at the same time is refused."""
    first = command(tmp_path, model, *LAKE, "run.name=twice", "--json")
    assert first.returncode == 0, first.stderr
    (tmp_path / "twice" / "result.json").unlink()
    second = command(tmp_path, model, *LAKE, "run.name=twice", "eval.tasks=9", "--json")
    assert second.returncode == 0, second.stderr
    assert (json.loads(second.stdout)["tasks"], json.loads(second.stdout)["closed"]) == (9, {})
    assert json.loads((tmp_path / "twice" / "result.json").read_text()) == json.loads(second.stdout)
    with lock(tmp_path / "twice" / ".lock", "held"):
        third = command(tmp_path, model, *LAKE, "run.name=twice")
    assert third.returncode == 2
    why = (
        "another `rlearner eval` or `up` is running there; wait for it, or choose another run.name"
    )
    assert third.stderr == f"error: {tmp_path / 'twice'}: {why}\n"
    assert json.loads((tmp_path / "twice" / "result.json").read_text())["tasks"] == 9


@pytest.mark.parametrize(
    ("model_name", "arguments", "says"),
    [
        ("/nowhere/model", [], "error: MODEL: '/nowhere/model' is not allowed"),
        (None, ["eval.taks=3"], "error: eval.taks: 3 is not allowed"),
        (
            None,
            ["rollout.model_path=x"],
            "error: rollout.model_path: 'x' is not allowed; null with rollout.policy actor",
        ),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, model: Path, model_name: str | None, arguments: list[str], says: str
) -> None:
    done = command(tmp_path, model_name or model, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert says in done.stderr
    assert not list(tmp_path.iterdir())
