"""Import paths of version 0.1 that plug-ins use: they work for one release, with a warning that
names the new one.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from broker.settings.registry import resolve
from broker.system.old_imports import MOVED

ROOT = Path(__file__).parents[3]
# What pages of version 0.1 and before told plug-ins to import, and what such a plug-in needs next
# to it: old path, new path.
OLD = {
    "broker.channel.carriers:Channel": "broker.channel.carriers:RequestChannel",
    "broker.channel.carriers:connect": "broker.channel.carriers:make_client",
    "broker.channel.carriers:serve": "broker.channel.carriers:make_server",
    "broker.config:Section": "broker.settings.config:Section",
    "broker.contract.streams:Kind": "broker.contract.streams:StreamKind",
    "broker.contract.streams:token": "broker.contract.streams:check_token",
    "broker.streams:Stream": "broker.contract.streams:Stream",
    "broker.wire:Trajectory": "broker.contract.wire:Trajectory",
    "learner.advantages.base:FloatArray": "learner.algorithm.advantages.base:FloatArray",
    "learner.advantages.base:Estimator": "learner.algorithm.advantages.base:AdvantageEstimator",
    "learner.algorithm.advantages.base:Row": "learner.algorithm.advantages.base:BatchRow",
    "learner.algorithm.losses.base:Loss": "learner.algorithm.losses.base:PolicyLoss",
    "learner.filters:FILTERS": "learner.algorithm.filters:FILTERS",
    "learner.losses.base:Tokens": "learner.algorithm.losses.base:LossTokens",
    "learner.losses.base:ratio": "learner.algorithm.losses.base:clamped_ratio",
    "learner.losses.preference:PreferenceLoss": "learner.algorithm.losses.preference:PreferenceLoss",
    "learner.losses.preference:Pairs": "learner.algorithm.losses.preference:PairLogprobs",
    "learner.reporting.trackers:flatten": "learner.reporting.trackers:flatten_settings",
    "learner.trackers:Tracker": "learner.reporting.trackers:Tracker",
    "rewardhub.bounded:Bounded": "rewardhub.bounded:BoundedFunction",
    "rewardhub.rewards.base:InvalidValue": "rewardhub.rewards.base:InvalidScoreError",
    "rewardhub.rewards.base:Reward": "rewardhub.rewards.base:RewardProtocol",
    "rollout.engines.base:Output": "rollout.engines.base:GenerationOutput",
    "rollout.engines.base:Stats": "rollout.engines.base:EngineStats",
    "rollout.engines.base:TappedEngine": "rollout.engines.base:StreamingEngine",
    "rollout.engines.base:problem": "rollout.engines.base:request_problem",
}
# What the pages of today and of version 0.1 tell plug-ins to import.
DOCUMENTED = [
    "broker.channel.carriers:RequestChannel",
    "broker.jetstream.bus:Bus",
    "broker.settings.config:Section",
    "broker.settings.secret:SecretRef",
    "envhub.envs.base:Environment",
    "envhub.envs.base:Observation",
    "envhub.envs.base:StepResult",
    "envhub.lengths.base:LengthEstimator",
    "learner.algorithm.losses.preference:PreferenceLoss",
    "learner.algorithm.traits:EstimatorTraits",
    "learner.algorithm.traits:LossTraits",
    "learner.algorithm.traits:declares",
    "learner.backends.base:Backend",
    "rewardhub.bounded:BoundedFunction",
    "rewardhub.rewards.base:ResponseFault",
    "rewardhub.rewards.base:RewardProtocol",
    "rewardhub.rewards.base:Sample",
    "rewardhub.rewards.base:Scored",
    "rollout.engines.base:Engine",
]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the old modules that were imported before, as only an import warns."""
    for module in list(sys.modules):
        if any(module == old or module.startswith(f"{old}.") for old in MOVED):
            monkeypatch.delitem(sys.modules, module)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("old", OLD)
def test_old_import_of_plugin(old: str, tmp_path: Path) -> None:
    module, name = old.split(":")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(f"from {module} import {name} as used\n", encoding="utf-8")
    with pytest.warns(FutureWarning, match=r"is now .*; the old name ends with 0\.3") as warned:
        used = resolve("rewards", f"{plugin}:used", {})
    assert {warning.filename for warning in warned} == {str(plugin)}
    new_module, new_name = OLD[old].split(":")
    assert used is getattr(importlib.import_module(new_module), new_name)


@pytest.mark.parametrize("path", [*DOCUMENTED, *OLD.values()])
def test_documented_import(path: str) -> None:
    module, name = path.split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hasattr(importlib.import_module(module), name)


def test_warning_is_visible_by_default(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text("from learner.losses.preference import Pairs\n")
    done = subprocess.run(
        [sys.executable, "-c", "import my_loss"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    new = "learner.algorithm.losses"
    ends = "; the old name ends with 0.3"
    assert done.returncode == 0, done.stderr
    assert [line.partition(": ")[2] for line in done.stderr.splitlines() if "my_loss" in line] == [
        f"FutureWarning: learner.losses is now {new}{ends}",
        f"FutureWarning: learner.losses.preference is now {new}.preference{ends}",
        f"FutureWarning: {new}.preference.Pairs is now {new}.preference.PairLogprobs{ends}",
    ]


def test_unknown_name_of_a_renamed_module() -> None:
    module = importlib.import_module("rollout.engines.base")
    with pytest.raises(AttributeError, match=r"'rollout\.engines\.base' has no attribute 'Gone'"):
        module.Gone  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"'broker\.gone'"):
        importlib.import_module("broker.gone")


def test_own_code_uses_new_names() -> None:
    old = tuple(f"{module}." for module in MOVED)
    for package in ("broker", "envhub", "learner", "rewardhub", "rlearner", "rollout", "bench"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                imported = node.module if isinstance(node, ast.ImportFrom) else None
                assert not f"{imported}.".startswith(old), file
