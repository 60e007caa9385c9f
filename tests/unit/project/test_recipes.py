"""What CONTRIBUTING promises: one new file and one line in a registry add a plug-in of each kind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.config import DomainSection
from broker.settings.registry import resolve
from broker.settings.runspec import load, validate
from envhub.domain import load_domain
from envhub.envs import ENVS
from envhub.lengths import ESTIMATORS
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.filters import FILTERS
from learner.algorithm.losses import LOSSES
from learner.backends import BACKENDS
from learner.offline import PREFERENCES
from learner.offline.config import validate_config as validate_offline
from learner.reporting.trackers import TRACKERS
from rewardhub import protocol
from rewardhub.rewards import REWARDS
from rewardhub.rewards.base import Sample
from rewardhub.worker import RewardWorker
from rollout.engines import ENGINES

FILE = """
from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, StepResult


class Parity(Environment):
    class Args(Section):
        modulus: int = 2

    isolation = "none"

    def reset(self, task_index, split, seed):
        self.answer = str(task_index % self.args.modulus)
        return Observation(f"{task_index} mod {self.args.modulus}?")

    def step(self, text):
        right = text.strip() == self.answer
        return StepResult(Observation(""), float(right), done=True, success=right)


class Vowels:
    class Args(Section):
        weight: float = 1.0

    def __init__(self, args):
        self.args = args

    def score(self, sample):
        return self.args.weight * sum(char in "aeiou" for char in sample.response)


class Engine: ...
class Backend: ...


class Tracker:
    def __init__(self, folder, run, project, config, args): ...


def estimate(trajectories, algorithm): ...
def loss(tokens, algorithm): ...
def correct(inputs, algorithm): ...
def keep(group): return True
def prefer(pairs, beta): ...
def shortly(turn): return 3
"""
# Kind, its registry, the object in the file, and settings that name it.
RUN_PLUGINS: list[tuple[str, dict[str, str], str, list[str]]] = [
    (
        "envs",
        ENVS,
        "Parity",
        [
            "domains.lake=null",
            "domains.odd={env: mine, env_args: {modulus: 3}, max_context_tokens: 256, sampling: {max_tokens: 4}}",
        ],
    ),
    ("rewards", REWARDS, "Vowels", ["domains.lake.rewards=[{name: mine, args: {weight: 2}}]"]),
    ("engines", ENGINES, "Engine", ["rollout.engine=mine"]),
    ("advantages", ADVANTAGES, "estimate", ["algorithm.adv_estimator=mine"]),
    ("losses", LOSSES, "loss", ["algorithm.pg_variant=mine"]),
    ("corrections", CORRECTIONS, "correct", ["algorithm.correction=mine"]),
    ("filters", FILTERS, "keep", ["algorithm.group_filter=mine"]),
    ("backends", BACKENDS, "Backend", ["train.backend=mine"]),
    ("length_estimators", ESTIMATORS, "shortly", ["domains.lake.length_estimator=mine"]),
    ("trackers", TRACKERS, "Tracker", ["trackers.use=[mine]"]),
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added_plugins.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "added_plugins", raising=False)


@pytest.mark.usefixtures("file")
@pytest.mark.parametrize(
    ("kind", "table", "attribute", "settings"), RUN_PLUGINS, ids=[kind for kind, *_ in RUN_PLUGINS]
)
def test_one_file_and_one_line_add_a_plug_in_of_a_run(
    kind: str,
    table: dict[str, str],
    attribute: str,
    settings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ["run.name=r", "warm_start.steps=0", *settings]
    with pytest.raises(ConfigError, match="mine"):  # without the line nothing has that name
        validate(load("quickstart.yaml", config))
    monkeypatch.setitem(table, "mine", f"added_plugins:{attribute}")
    assert validate(load("quickstart.yaml", config))["run"]["name"] == "r"
    assert resolve(kind, "mine", table).__name__ == attribute


@pytest.mark.usefixtures("file")
def test_an_added_preference_loss_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "pairs.jsonl").write_text("")
    config = ["run.name=r", f"data.train={tmp_path / 'pairs.jsonl'}", "dpo.loss=mine"]
    with pytest.raises(ConfigError, match="mine"):
        validate_offline("dpo", load("dpo.yaml", config))
    monkeypatch.setitem(PREFERENCES, "mine", "added_plugins:prefer")
    assert validate_offline("dpo", load("dpo.yaml", config)).to_plain()["dpo"]["loss"] == "mine"


@pytest.mark.usefixtures("file")
def test_an_added_environment_plays_and_an_added_reward_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ENVS, "mine", "added_plugins:Parity")
    environment: Any = load_domain("d", DomainSection(env="mine", env_args={"modulus": 3})).make()
    assert environment.reset(7, "train", 0).text == "7 mod 3?"
    assert (environment.step("1").reward, environment.step("2").reward) == (1.0, 0.0)
    monkeypatch.setitem(REWARDS, "mine", "added_plugins:Vowels")
    sample = Sample(
        domain="d", task_index=0, prompt="", response="a queue", reference="", reward=0.0, reward_parts={},
        success=True,
        end="terminated", num_turns=1, num_tokens=2, metrics={},
    )  # fmt: skip
    worker = RewardWorker()
    try:
        assert worker.answer(
            protocol.ScoreRequest("mine", {"weight": 2.0}, sample)
        ) == protocol.ScoreReply(10.0)
        refused = worker.answer(protocol.ScoreRequest("mine", {"wieght": 2.0}, sample))
    finally:
        worker.close()
    assert isinstance(refused, protocol.ScoreFailureReply)
    assert "wieght" in refused.detail
    assert not refused.retry
