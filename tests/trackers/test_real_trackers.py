"""The trackers against the real packages, without a network: two lives of a run are one run, and
all of it is there. By ``make test-trackers``.
"""

from __future__ import annotations

import json
import os
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = os.environ.get("RL_TRACKERS_PYTHON")
CONFIG = {
    "train": {"lr": 0.001, "steps": 4},
    "model": {"path": None},
    "domains": {"lake": {"rewards": ["a", "b"], "max_turns": 3}},
}
LATER = {**CONFIG, "train": {"lr": 0.01, "steps": 4}, "eval": {"tasks": 8}}
COLUMNS = ["step", "domain", "reward", "success", "text"]
NAMES = {"mlflow": "eval/avg_8"}  # of eval/avg@8, where its own is not allowed

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="needs the trackers' packages: make test-trackers"
)


def ran(*words: str) -> str:
    """Return what a program in the trackers' environment prints, in a network namespace without a
    way out.
    """
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(Path(words[2])),  # nothing of this user
        "PYTHONPATH": str(HERE.parents[1]),
        "PYTHONWARNINGS": "error::ResourceWarning",
    }
    alone = ["unshare", "--net"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*alone, str(PYTHON), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "is disabled" not in done.stderr  # what TrackerGroup says of one that failed
    return done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["wandb", "swanlab", "trackio", "mlflow"])
def test_two_lives_are_one_run_with_everything(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    ids = []
    for first, config in ((1, CONFIG), (3, LATER)):
        out = ran(str(HERE / "write_run.py"), name, str(folder), str(first), json.dumps(config))
        ids.append(
            next(line for line in out.splitlines() if line.startswith("id ")).removeprefix("id ")
        )
    assert ids[0] == ids[1]
    assert name in ("trackio", "mlflow") or ids[0] == "demo"
    found: dict[str, Any] = json.loads(
        ran(str(HERE / "read_run.py"), name, str(folder)).splitlines()[-1]
    )
    assert list(found) == [ids[0]]
    run = found[ids[0]]
    assert run["values"] == {
        "reward/mean": [[step, step / 10] for step in (1, 2, 3, 4)],
        NAMES.get(name, "eval/avg@8"): [[step, 0.5] for step in (1, 2, 3, 4)],
    }
    assert sorted(run["texts"]) == sorted(run["tables"]) == sorted(run["pictures"]) == ["2", "4"]
    text = "step 4: a &lt; b **x** ü" if name == "wandb" else "step 4: a < b **x** ü"
    assert text in run["texts"]["4"]
    assert run["tables"]["4"] == [
        COLUMNS,
        [[4, "lake", 0.5, True, "hi <b>\nthere"], [4, "lake", 0.0, False, "ü"]],
    ]
    assert run["pictures"]["4"] == sha256((HERE / "two_frames.gif").read_bytes()).hexdigest()
    assert run["config"]["domains"] == CONFIG["domains"]
    assert run["config"]["train"]["lr"] == 0.01  # as it is now
    if name == "mlflow":
        params = {
            "train.lr": "0.001",
            "train.steps": "4",
            "model.path": "None",
            "domains.lake.max_turns": "3",
        }
        assert run["params"] == {**params, "domains.lake.rewards": "['a', 'b']", "eval.tasks": "8"}
        assert run["status"] == "FINISHED"


def test_the_packages_bring_no_torch() -> None:
    code = "import importlib.metadata as m; print(sorted(d.metadata['Name'].lower() for d in m.distributions()))"
    done = subprocess.run([str(PYTHON), "-c", code], capture_output=True, text=True, check=True)
    names = json.loads(done.stdout.replace("'", '"'))
    assert {"wandb", "swanlab", "swanboard", "trackio", "mlflow-skinny"} <= set(names)
    assert "torch" not in names
    assert [one for one in names if one.startswith("nvidia") and one != "nvidia-ml-py"] == []


def test_wrong_arguments_and_a_missing_package_are_one_line(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from learner.config import TrackersSection as S\n"
        "from learner.reporting.trackers import TrackerGroup\n"
        "TrackerGroup(S(use=['mlflow'], args={'mlflow': {'uri': 'x'}}), Path(sys.argv[1]), 'r', {})"
    )
    done = subprocess.run(
        [str(PYTHON), "-c", code, str(tmp_path)],
        env={"PYTHONPATH": str(HERE.parents[1]), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    said = "trackers.args.mlflow.uri: 'x' is not allowed; known: tracking_uri, experiment, tags"
    assert said in done.stderr.splitlines()[-1]
