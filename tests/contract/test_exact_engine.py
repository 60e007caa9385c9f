"""Engine hf with ``rollout.exact``: the same bits in any pass, and the learner's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hf_models as models
import numpy as np
import pytest
import torch

from broker.contract import wire
from broker.errors import OfferRefused, UserError
from broker.weights.probe import make_probe
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf.engine_core import EngineCore

TOKENS = 30


def opened(path: Path, **section: Any) -> EngineCore:
    values = {"max_running": 6, "max_context_tokens": 256, "num_threads": 1, "exact": True}
    return EngineCore(
        EngineConfig(str(path), RolloutSection(**values | section), device="cpu", policy_version=0)
    )


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture
def core(path: Path) -> Iterator[EngineCore]:
    core = opened(path)
    yield core
    core.model.close()


def answers(core: EngineCore, requests: list[wire.GenerateRequest]) -> list[GenerationOutput]:
    """Run requests next to each other; one enters after the other."""
    for request in requests:
        core.submit(request, 0.0)
        core.admit(0.0)
        core.step()
    for _ in range(600):
        core.admit(0.0)
        if core.can_step:
            core.step()
    outputs = dict(core.outbox)
    core.outbox.clear()
    return [outputs[request.request_id] for request in requests]


def requests(name: str) -> list[wire.GenerateRequest]:
    """Prompts of different lengths, two of which begin alike, and the same again."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, models.VOCAB, n).tolist() for n in (3, 40, 77, 130)]
    prompts += [[*prompts[2][:50], 9, 8, 7], prompts[3]]
    return [
        models.request(f"{name}-{number}", prompt, max_tokens=TOKENS, seed=number, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]


def sequence(request: wire.GenerateRequest, output: GenerationOutput) -> list[int]:
    return [*request.token_ids.array().tolist(), *output.token_ids]


def test_logprobs_have_the_bits_of_a_sequence_alone(core: EngineCore) -> None:
    for name in ("first", "again"):
        asked = requests(name)
        for request, output in zip(asked, answers(core, asked), strict=True):
            alone = core.model.logprobs(sequence(request, output))[-TOKENS:]
            assert np.array_equal(np.array(output.logprobs, np.float32), alone.numpy())
    # the second time prompts were in the cache, whole or in part
    assert core.stats().prefix_hit_tokens > 300


def test_new_weights_give_new_bits_that_are_exact_again(core: EngineCore, path: Path) -> None:
    asked = requests("old")
    old = answers(core, asked)
    tensors = models.changed(models.load(path), 3)
    core.update(tensors, 1, "recompute", None)
    asked = requests("new")
    new = answers(core, asked)
    assert [output.logprobs for output in new] != [output.logprobs for output in old]
    for request, output in zip(asked, new, strict=True):
        alone = core.model.logprobs(sequence(request, output))[-TOKENS:]
        assert np.array_equal(np.array(output.logprobs, np.float32), alone.numpy())


def test_a_probe_that_differs_in_the_last_bit_is_refused(core: EngineCore) -> None:
    tokens = list(range(2, 40))
    own = core.model.logprobs(tokens).numpy()
    tensors = {name: tensor.clone() for name, tensor in core.model.weights().items()}
    core.update(tensors, 1, "recompute", make_probe(tokens, own, tolerance=0.0))
    assert core.version == 1
    own[7] = np.nextafter(own[7], np.float32(0))
    with pytest.raises(OfferRefused, match=r"token 8 differs by .* rollout.exact allows no diff"):
        core.update(tensors, 2, "recompute", make_probe(tokens, own, tolerance=0.0))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt2", "Conv1D multiplies matrices outside linear layers"),
        ("mixtral", "multiplies matrices outside linear layers"),
        ("gemma2", "no attention with windows, caps or sinks"),
    ],
)
def test_models_that_cannot_be_exact_are_refused(name: str, reason: str, tmp_path: Path) -> None:
    path = models.make(name, tmp_path)
    with pytest.raises(UserError, match=reason):
        opened(path)


def test_weights_are_copied_to_aligned_memory(core: EngineCore) -> None:
    memory = {
        name: torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        for name, tensor in core.model.weights().items()
    }
    for name, tensor in core.model.weights().items():
        memory[name].copy_(tensor)
    core.update(memory, 1, "recompute", None)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in core.model.weights().values())
