"""``rlearner check`` plays one episode and scores it once with the user's own code, in worker
processes, and refuses what the learner of an existing run would refuse.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from bare_checkpoints import write_bare_checkpoint
from waits import LONG_S

from learner.prepare import to_yaml
from rlearner.cli import main

QUICK = "configs/quickstart.yaml"

ENV = """
from envhub.envs.base import Environment, Observation, StepResult
class Own(Environment):
    def reset(self, task_index, split, seed):
        self.prompt, self.reference = "say it", "it"
        return Observation("say it")
    def step(self, text):
        {step}
"""
GOOD = 'return StepResult(Observation("no"), reward=0.0, done=True)'
CONFIG = """
domains:
  mine:
    env: "{folder}/own.py:Own"
    max_turns: 2
    max_context_tokens: 64
    sampling: {{max_tokens: 4}}
    rewards: [{{name: "{folder}/own_reward.py:score"}}]
"""


def write(folder: Path, step: str = GOOD, score: str = "return 0.5 * len(sample.response)") -> str:
    (folder / "own.py").write_text(ENV.format(step=step))
    (folder / "own_reward.py").write_text(f"def score(sample):\n    {score}\n")
    path = folder / "own.yaml"
    path.write_text(CONFIG.format(folder=folder))
    return str(path)


def test_good_code_is_tried_and_leaves_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = psutil.Process().children(recursive=True)  # of other tests in this process
    config = write(
        tmp_path,
        score=f"open({str(tmp_path / 'seen')!r}, 'w').write(f'{{sample.prompt}} {{sample.reference}}'); return 1",
    )
    assert main(["check", config]) == 0
    assert "error" not in capsys.readouterr().err
    assert (tmp_path / "seen").read_text() == "say it it"
    left = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert psutil.wait_procs(left, timeout=LONG_S)[1] == []


def test_a_function_of_trl_is_tried_with_the_row_and_the_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path)
    (tmp_path / "own.py").write_text(
        ENV.format(step=GOOD.replace("done=True", "done=False")).replace(
            "return Observation", 'self.row = {"level": 2}; return Observation'
        )
    )
    # of a domain with two turns
    (tmp_path / "own_reward.py").write_text(
        f"""
def score(completions, prompts, level):
    file = open({str(tmp_path / "seen")!r}, "w")
    print([message["content"] for message in prompts[0] + completions[0]], file=file)
    return level
"""
    )
    assert main(["check", config]) == 0
    assert "error" not in capsys.readouterr().err
    assert (tmp_path / "seen").read_text() == "['say it', 'trial', 'no', 'trial']\n"


@pytest.mark.parametrize(
    ("step", "score", "says"),
    [
        (
            "return 1 / 0",
            "return 1",
            "own.py:Own failed in a trial episode: step raised ZeroDivisionError: division by zero",
        ),
        ("return None", "return 1", "own.py:Own failed in a trial episode: step returned"),
        (
            "import os; os._exit(7)",
            "return 1",
            "own.py:Own failed in a trial episode: step: the worker process ended with exit code 7",
        ),
        (GOOD, "return sample.no_such", "own_reward.py:score failed on a trial episode: "),
        (GOOD, "return 'high'", "own_reward.py:score failed on a trial episode: "),
    ],
)
def test_code_that_fails_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str, score: str, says: str
) -> None:
    config = write(tmp_path, step, score)
    assert main(["check", config]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: domains.mine.")
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert main(["check", config, "--no-trial"]) == 0


def test_fewer_steps_than_a_run_has_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["check", QUICK, f"run.dir={tmp_path}", "run.name=a"]
    assert main(words) == 0
    write_bare_checkpoint(tmp_path / "a" / "checkpoints", {"version": 99})
    capsys.readouterr()
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "error: train.steps: 40 is not allowed; run a has made 99 steps already: "
    )


def test_another_model_than_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", QUICK, f"run.dir={tmp_path}", "run.name=a", "--json"]
    assert main(words) == 0
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    sections = {"run": {"name": "a"}, "model": {"tiny": {"hidden_size": 32}}, "domains": {}}
    (tmp_path / "a" / "config.yaml").write_text(to_yaml(sections))
    capsys.readouterr()
    assert main(words) == 2
    assert "error: model.tiny.hidden_size: 128 is not allowed; run a began with 32" in (
        capsys.readouterr().err
    )
