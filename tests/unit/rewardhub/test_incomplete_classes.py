"""A class of a user's own that lacks a method is refused before the start, with its file and line."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import incomplete_classes
import pytest

from broker.errors import ConfigError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from envhub.config import check as check_envs
from envhub.domain import load_domain, load_domains
from rewardhub import protocol
from rewardhub.config import check as check_rewards
from rewardhub.worker import RewardWorker

HERE = str(Path(incomplete_classes.__file__))


def line(thing: Any) -> int:
    return inspect.getsourcelines(thing)[1]


CLASSES = incomplete_classes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "NoStep",
            f"class NoStep (incomplete_classes.py:{line(CLASSES.NoStep)}) has no method step(self, text)",
        ),
        (
            "ShortReset",
            f"reset(self, task_index: 'int') -> 'Observation' (incomplete_classes.py:{line(CLASSES.ShortReset.reset)}) "
            f"must take "
            "(self, task_index, split, seed)",
        ),
        (
            "NoUse",
            f"class NoUse (incomplete_classes.py:{line(CLASSES.NoUse)}) has no method use(self, calls), which its "
            f"tools need",
        ),
    ],
)
def test_an_environment(name: str, says: str) -> None:
    config = {"domains": {"d": {"env": f"{HERE}:{name}"}}}
    for look in (check_envs, load_domains):  # what every command does, and a hub
        with pytest.raises(ConfigError) as caught:
            look(RunSettings.of_config(config))
        assert str(caught.value) == f"domains.d.env: '{HERE}:{name}' is not allowed; {says}"


def rewarded(name: str) -> RunSettings:
    domain = {"env": "qa", "rewards": [{"name": f"{HERE}:{name}"}]}
    return RunSettings.of_config({"domains": {"d": domain}})


def test_what_is_whole_passes() -> None:
    settings = RunSettings.of_config({"domains": {"d": {"env": f"{HERE}:Whole"}}})
    load_domains(settings)["d"].check()
    check_rewards(rewarded("Plain"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "NoScore",
            f"class NoScore (incomplete_classes.py:{line(CLASSES.NoScore)}) has no method score(self, sample)",
        ),
        (
            "NoSample",
            f"score(self) -> 'float' (incomplete_classes.py:{line(CLASSES.NoSample.score)}) must take (self, sample)",
        ),
    ],
)
def test_a_reward(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rewards(rewarded(name))
    assert str(caught.value) == f"domains.d.rewards.0.name: '{HERE}:{name}' is not allowed; {says}"
    loaded = RewardWorker().answer(protocol.LoadRewardRequest(f"{HERE}:{name}", {}))
    assert isinstance(loaded, protocol.ScoreFailureReply)
    assert says in loaded.detail


def test_a_file_that_fails_to_import_says_where(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(
        ConfigError,
        match=r"mine\.py fails to import: JSONDecodeError: .* \(mine\.py:3 in <module>\)$",
    ):
        load_domain("d", DomainSection(env=f"{tmp_path}/mine.py:Mine"))
