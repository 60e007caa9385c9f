"""A learner with ``rollout.exact``: the same bits in any batch, ordinary gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch_backend_kit as kit
from hf_models import make

from broker.errors import ConfigError
from learner.algorithm.samples import TrainSample
from learner.backends.models.attention import SequenceAttention
from learner.backends.models.exact_attention import ExactAttention
from learner.backends.torch import TorchBackend
from learner.config import TrainSection


def backend(path: str, *, exact: bool = True, **train: object) -> TorchBackend:
    section = TrainSection.model_validate({"lr": 1e-3, "device": "cpu", "num_threads": 1, **train})
    return kit.backend(path, train=section, exact=exact, max_context=128)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model") / "model")


def test_the_gradient_of_attention_is_the_ordinary_one() -> None:
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, heads, 70, 16, generator=generator) for heads in (4, 2, 2)]
    ours = [state.clone().requires_grad_() for state in states]
    theirs = [state.clone().requires_grad_() for state in states]
    ExactAttention(0.3)(*ours).square().sum().backward()
    SequenceAttention(0.3)(*theirs).square().sum().backward()
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_scores_have_the_same_bits_next_to_others(path: str, packing: str) -> None:
    trainer = backend(path, packing=packing)
    samples = kit.samples(1, 12)
    together = trainer.score(samples)
    for sample, scores in zip(samples, together, strict=True):
        (alone,) = trainer.score([sample])
        assert np.array_equal(alone.logprobs, scores.logprobs)
        # as the probe of an offer is computed, which servers compare with their own
        probe = trainer.logprobs(sample.token_ids).numpy()[sample.positions - 1]
        assert np.array_equal(probe, scores.logprobs)
    trainer.close()


def test_a_step_trains_as_an_ordinary_one(path: str) -> None:
    gradients = []
    for exact in (True, False):
        trainer = backend(path, exact=exact)
        trainer.forward_backward(kit.samples(2))
        gradients.append(kit.gradient(trainer))
        assert trainer.step()["actor/grad_norm"] > 0
        trainer.close()
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_own_logprobs_give_a_ratio_of_exactly_one_after_updates(path: str) -> None:
    trainer = backend(path)
    for step in range(3):
        samples = kit.samples(step)
        recorded = [
            _with_logprobs(sample, trainer.logprobs(sample.token_ids).numpy()) for sample in samples
        ]
        trainer.forward_backward(recorded)
        metrics = trainer.step()
        assert (metrics["rollout_corr/is_mean"], metrics["rollout_corr/kl"]) == (1.0, 0.0)
    trainer.close()


def _with_logprobs(sample: TrainSample, logprobs: np.ndarray) -> TrainSample:
    columns = {
        name: getattr(sample, name)
        for name in ("token_ids", "loss_mask", "versions", "advantages", "group", "reward")
    }
    return TrainSample(rollout_logprobs=np.append(np.float32(0), logprobs), **columns)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "Conv1D multiplies matrices outside linear layers"),
        ("gemma2", "windows, caps or sinks"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"rollout.exact: True is not allowed; .*{reason}"):
        backend(str(make(family, tmp_path)))
