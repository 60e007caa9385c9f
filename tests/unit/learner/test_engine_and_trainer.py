"""What the engine says it sampled with is what the trainer computes for the same tokens; a stale
engine is found out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hf_models as models
import numpy as np
import pytest
import torch

from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine_core import EngineCore

CLOSE = 1e-4


def sampled(path: Path, temperature: float) -> list[TrainSample]:
    """Six answers of 12 tokens from the engine, batched four at a time, as training samples."""
    core = EngineCore(
        EngineConfig(
            str(path),
            RolloutSection(max_running=4, max_context_tokens=64, num_threads=1),
            device="cpu",
            policy_version=0,
        )
    )
    prompts = {str(i): [2 + (7 * i + j) % 100 for j in range(3 + 2 * i)] for i in range(6)}
    for name, prompt in prompts.items():
        core.submit(
            models.request(name, prompt, seed=int(name), temperature=temperature, max_tokens=12),
            0.0,
        )
    while core.scheduler.num_running + core.scheduler.num_waiting:
        core.admit(0.0)
        if core.can_step:
            core.step()
    outputs = dict(core.outbox)
    core.model.close()
    samples = []
    for name, prompt in prompts.items():
        answer, before = outputs[name], np.zeros(len(prompt), np.float32)
        mask = np.array([0] * len(prompt) + [1] * len(answer.token_ids), np.uint8)
        samples.append(
            TrainSample(
                token_ids=np.array([*prompt, *answer.token_ids], np.int32),
                loss_mask=mask,
                rollout_logprobs=np.concatenate([before, np.array(answer.logprobs, np.float32)]),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=mask.astype(np.float32),
                group=1,
                reward=0.0,
                temperature=temperature,
            )
        )
    return samples


def largest_difference(path: Path, samples: list[TrainSample]) -> tuple[float, dict[str, float]]:
    trainer = TorchBackend(
        str(path),
        train=TrainSection(lr=1e-3, device="cpu"),
        algorithm=AlgorithmSection(),
        model=ModelSection(),
        seed=0,
    )
    scores = trainer.score(samples)
    gaps = [
        np.abs(told.logprobs - one.rollout_logprobs[one.positions]).max()
        for told, one in zip(scores, samples, strict=True)
    ]
    trainer.forward_backward(samples)
    return float(max(gaps)), trainer.step()


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_engine_and_trainer_agree(tmp_path: Path, name: str, temperature: float) -> None:
    path = models.make(name, tmp_path)
    gap, metrics = largest_difference(path, sampled(path, temperature))
    assert gap < CLOSE
    assert abs(metrics["rollout_corr/kl"]) < CLOSE
    assert metrics["rollout_corr/ess"] > 1 - CLOSE


def test_a_stale_engine_is_found_out(tmp_path: Path) -> None:
    # One small update on the trainer's side: a hundredth of a typical weight.
    old, new = models.make("qwen3", tmp_path), tmp_path / "new"
    model = models.load(old)
    with torch.no_grad():
        for parameter, other in zip(
            model.parameters(), models.changed(model, 1).values(), strict=True
        ):
            parameter.lerp_(other, 0.01)
    model.save_pretrained(new)
    gap, metrics = largest_difference(new, sampled(old, 1.0))
    assert gap > 10 * CLOSE
    assert metrics["rollout_corr/ess"] < 1 - 1e-6


def test_a_forgotten_temperature_is_found_out(tmp_path: Path) -> None:
    path = models.make("qwen3", tmp_path)
    samples = [replace(one, temperature=1.0) for one in sampled(path, 0.9)]
    assert largest_difference(path, samples)[0] > 10 * CLOSE
