"""The learner says what servers compute that are sent FP8: with the very weights that they make of
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch_backend_kit import backend, samples, save_model

from broker.weights import fp8
from broker.weights.memory.staging import FlatBuffer, plan_of
from learner.config import LoraSection, TrainSection
from rlearner_text.config import ModelSection

IDS = list(range(20))


@pytest.mark.parametrize(
    ("dtype", "lora"), [("float32", False), ("bfloat16", False), ("float32", True)]
)
def test_logprobs_are_a_servers_and_the_weights_stay(
    tmp_path: Path, dtype: str, lora: bool
) -> None:
    if lora:
        pytest.importorskip("peft", reason="adapters need rlearner[lora]")
    path, model = save_model(tmp_path), ModelSection(dtype=dtype)
    train = TrainSection(
        lr=0.1,
        device="cpu",
        weights_dtype="fp8",
        lora=LoraSection(rank=4, send="merged") if lora else None,
    )
    trainer = backend(path, train=train, model=model)
    trainer.forward_backward(samples(0))
    trainer.step()
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    said = trainer.logprobs(IDS)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())

    flat = FlatBuffer(plan_of(trainer.shapes(), 32, dtype="fp8"))
    flat.fill(trainer.weights())
    given = fp8.DequantizedModel(
        flat.tensors, {name: tensor.dtype for name, tensor in trainer.shapes().items()}
    ).made()
    server = backend(path, model=model)
    with torch.no_grad():
        for name, tensor in server.weights().items():
            tensor.copy_(given[name])
    assert torch.equal(said, server.logprobs(IDS))
    with torch.no_grad():
        for name, tensor in server.weights().items():
            tensor.copy_(before[name])
    # ten times what two float32 kernels may differ by
    assert float((said - server.logprobs(IDS)).abs().max()) > 0.05


def test_a_pass_that_breaks_leaves_the_weights_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = backend(save_model(tmp_path), train=TrainSection(device="cpu", weights_dtype="fp8"))
    before = dict(trainer.policy.module.named_parameters())
    module = trainer.policy.module.model.layers[1].mlp.down_proj

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.logprobs(IDS)
    after = dict(trainer.policy.module.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not any(
        each._forward_hooks or each._forward_pre_hooks for each in trainer.policy.module.modules()
    )
