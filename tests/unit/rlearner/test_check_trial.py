"""``rlearner check`` plays one episode and scores it once with the user's own code, in worker
processes.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from waits import LONG_S

from rlearner.cli import main

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
