"""The learner's combinations: each impossible one is refused with the key, the value and what is
allowed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.errors import ConfigError
from broker.settings.config import RunSection
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import load, validate
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.losses import LOSSES
from learner.backends import BACKENDS
from learner.prepare import name_run, run_folder, to_yaml

LAKE = {
    "env": "frozenlake",
    "group_size": 4,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
    "deadline_s": 60,
}


def merged(**sections: Any) -> dict[str, Any]:
    return {"domains": {"lake": LAKE}, **sections}


@pytest.mark.parametrize(
    ("sections", "key", "allowed"),
    [
        ({"domains": {}}, "domains", "at least one domain"),
        (
            {"algorithm": {"pg_variant": "pppo"}},
            "algorithm.pg_variant",
            f"did you mean 'ppo'? known: {', '.join(sorted(LOSSES))}",
        ),
        (
            {"algorithm": {"adv_estimator": "nope"}},
            "algorithm.adv_estimator",
            f"known: {', '.join(sorted(ADVANTAGES))}",
        ),
        ({"train": {"backend": "jax"}}, "train.backend", f"known: {', '.join(sorted(BACKENDS))}"),
        (
            {"trackers": {"use": ["tensorbord"]}},
            "trackers.use",
            "did you mean 'tensorboard'? known: mlflow, swanlab, tensorboard, trackio, wandb",
        ),
        (
            {"trackers": {"args": {"wandb": {}}}},
            "trackers.args.wandb",
            "trackers.use does not name it",
        ),
        (
            {"algorithm": {"pg_variant": "no.such:thing"}},
            "algorithm.pg_variant",
            "there is no module 'no.such'",
        ),
        (
            {"train": {"weights_backend": "nccl", "device": "cpu"}},
            "train.weights_backend",
            "gloo with train.device cpu",
        ),
        (
            {"train": {"weights_backend": "ipc", "device": "cpu"}},
            "train.weights_backend",
            "shared with train.device cpu: ipc is",
        ),
        (
            {"train": {"weights_snapshot_port": 0}},
            "train.weights_snapshot_port",
            "null without train.weights_snapshot_every",
        ),
        (
            {"train": {"weights_snapshot_cert": "cert.pem"}},
            "train.weights_snapshot_cert",
            "null, or set together with train.weights_snapshot_key and train.weights_snapshot_port",
        ),
        (
            {"train": {"micro_batch_tokens": 255}},
            "train.micro_batch_tokens",
            "at least domains.lake.max_context_tokens, which is 256",
        ),
        (
            {"train": {"steps": 5, "warmup_steps": 5}},
            "train.warmup_steps",
            "below train.steps, which is 5",
        ),
        (
            {"train": {"ticket_timeout_s": 60.0}},
            "train.ticket_timeout_s",
            "above domains.lake.deadline_s, which is 60",
        ),
        (
            {"train": {"ranks": 2}},
            "train.ranks",
            "1 with train.backend torch; more with ddp, fsdp2, deepspeed or megatron",
        ),
        (
            {"train": {"backend": "ddp", "ranks": 2, "device": "cuda:1"}},
            "train.device",
            "auto, cpu or cuda with train.ranks 2: each rank takes a GPU of its own",
        ),
        ({"train": {"max_staleness": -1}}, "train.max_staleness", "greater than or equal to 0"),
        ({"train": {"on_late": "skip"}}, "train.on_late", "'drop' or 'wait'"),
        ({"train": {"lr": "fast"}}, "train.lr", "valid number"),
        ({"train": {"stepss": 3}}, "train.stepss", "did you mean 'train.steps'?"),
        ({"algorithm": {"dual_clip": 1.0}}, "algorithm.dual_clip", "above 1"),
        (
            {"domains": {"lake": {**LAKE, "group_size": 1}}},
            "domains.lake.group_size",
            "at least 2 with algorithm.adv_estimator grpo",
        ),
        (
            {
                "domains": {"lake": {**LAKE, "group_size": 1}},
                "algorithm": {"adv_estimator": "reinforce", "filter_zero_variance": True},
            },
            "domains.lake.group_size",
            "at least 2 with algorithm.filter_zero_variance",
        ),
        (
            {"domains": {"lake": {**LAKE, "sampling": {"temperature": 0.0, "max_tokens": 4}}}},
            "domains.lake.sampling.temperature",
            "above 0",
        ),
        (
            {"domains": {"lake": LAKE | {"thinking": "drop", "max_turns": 2}}},
            "domains.lake.thinking",
            "keep with whole conversations, trained as they were sampled; drop needs context: steps",
        ),
        (
            {"model": {"tiny": {"max_position_embeddings": 128}}},
            "domains.lake.max_context_tokens",
            "max_position_embeddings, which is 128",
        ),
        ({"model": {"path": "./no-such-folder"}}, "model.path", "no such folder"),
        ({"warm_start": {"steps": 5, "domain": "sea"}}, "warm_start.domain", "one of lake"),
        ({"warm_start": {"steps": 5, "data": "/no/such.jsonl"}}, "warm_start.data", "no such file"),
        (
            {"domains": {"a": LAKE, "b": LAKE}, "warm_start": {"steps": 5}},
            "warm_start.domain",
            "one of a, b, or * for all that are trained",
        ),
        ({"eval": {"baseline": "actor"}}, "eval.baseline", "the policy being trained"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep", "greater than or equal to 2"),
    ],
)
def test_refused(sections: dict[str, Any], key: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(merged(**sections))
    assert caught.value.key == key
    assert allowed in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("on_late", ["drop", "wait"])
def test_staleness_and_lateness_combine_freely(max_staleness: int, on_late: str) -> None:
    checked = validate(merged(train={"max_staleness": max_staleness, "on_late": on_late}))
    assert checked["train"]["max_staleness"] == max_staleness


@pytest.mark.parametrize("name", ["quickstart", "agent"])
def test_shipped_configurations_are_valid_and_survive_yaml(name: str) -> None:
    checked = validate(load(f"configs/{name}.yaml"))
    assert validate(yaml.safe_load(to_yaml(checked))) == checked


def test_a_name_is_made_up_where_none_is_given(tmp_path: Path) -> None:
    named = name_run({"run": {"dir": str(tmp_path)}}, "configs/my lake.yaml")
    assert named["run"]["name"].startswith("my-lake-20")
    assert (
        run_folder(RunSettings.of_config(validate(merged(**named))).run)
        == tmp_path / named["run"]["name"]
    )
    assert name_run({"run": {"name": "mine"}}, "x.yaml")["run"] == {"name": "mine"}
    assert name_run({}, "größe.yaml")["run"]["name"].startswith("gr--e-20")


def test_a_run_cannot_live_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        ConfigError,
        match=r"^run\.dir: '.*/notes\.txt/deeper' is not allowed; a folder.*notes\.txt is a file",
    ):
        run_folder(RunSection(dir=str(tmp_path / "notes.txt" / "deeper"), name="r"))
