"""Adapters, and a reference without weights of its own, on two ranks: as one process, and the same
bits on resume.
"""

import os

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep, state_of, tensors_of

from broker.weights.adapter import MergedModel, factor_shapes
from learner.config import AlgorithmSection
from rlearner_text.config import ModelSection

pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

NAMES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
IDS = np.arange(9)
STEPS = 5
OFFLOADED = {"optimizer_offload": True, "activation_offload": True}
# Backend, its options, and another layout that goes on where it has stopped.
CASES = [
    pytest.param(
        "fsdp2",
        OFFLOADED,
        "ddp",
        marks=pytest.mark.skipif(
            "RL_OPTIONS" not in os.environ, reason="five processes: make test-options"
        ),
    ),
    *(
        pytest.param(f"deepspeed-{stage}", {}, "torch", id=f"deepspeed-{stage}")
        for stage in ("1", "2", "3", "3-offload")
    ),
    *(
        pytest.param(name, {"gradient_checkpointing": name == "megatron"}, "torch", id=name)
        for name in ("megatron", "megatron-tp2", "megatron-pp2")
    ),
]


def start(variant, path, first=None, *, model=None, **more):
    lora = {"rank": 4, "alpha": 8, **more.pop("lora", {})}
    return make(
        variant,
        path,
        algorithm=AlgorithmSection(kl_coef=0.2),
        ref_path=first,
        model=model,
        lora=lora,
        **more,
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("variant", "options", "another"), CASES)
def test_two_ranks_train_adapters_as_one_does(tmp_path, variant, options, another):
    path = kit.save_model(tmp_path / "first", kv_heads=2)
    whole = start(variant, path, **options)
    alone = start("torch", path)
    expected = run(alone, range(STEPS))
    written = tmp_path / "checkpoint"
    try:
        found = run(whole, range(2))
        parts = keep(whole, written)
        probe = whole.logprobs(IDS)
        found += run(whole, range(2, STEPS))
        weights = dict(whole.weights())
        shapes = whole.shapes()
        adapter, factors = whole.adapter(), dict(whole.factors())
        state = state_of(whole)
    finally:
        whole.close()
    agree(found, expected)
    assert expected[3]["actor/kl_loss"] > 1e-4
    assert list(weights) == list(alone.weights()) == list(shapes)
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
    assert any(name.startswith("adapter.base_model.model.") for name in tensors_of(parts))
    assert adapter is not None
    assert adapter == alone.adapter()  # the digest of the weights below, too
    assert {name: tensor.shape for name, tensor in factors.items()} == {
        name: tensor.shape
        for name, tensor in factor_shapes(shapes, adapter.targets, adapter.rank).items()
    }
    assert all(tensor.dtype == torch.float32 for tensor in factors.values())
    base = kit.backend(path).weights()
    for name, tensor in MergedModel(base, factors, adapter.targets, adapter.scale).made().items():
        assert torch.equal(tensor, weights[name])
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in state_of(alone).items()
    }

    again = start(variant, str(written), path, **options)
    try:
        again.load_state(parts)
        assert run(again, range(2, STEPS)) == found[2:]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in again.weights().items())
    finally:
        again.close()
    other = start(another, str(written), path)  # another layout, and nothing that is offloaded
    try:
        other.load_state(parts)
        torch.testing.assert_close(other.logprobs(IDS), probe, rtol=0, atol=1e-6)
        agree(run(other, range(2, STEPS)), expected[2:])
    finally:
        other.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [("deepspeed-1", 1), ("deepspeed-2", 1), ("deepspeed-3", 2), ("megatron-tp2", 2)],
)
def test_float32_adapters_of_a_bfloat16_model(tmp_path, variant, ranks):
    path, model = (
        kit.save_model(tmp_path / "first", dtype=torch.bfloat16, kv_heads=2),
        ModelSection(dtype="bfloat16"),
    )
    whole, alone = start(variant, path, model=model, ranks=ranks), start("torch", path, model=model)
    try:
        # Megatron's norms round otherwise, and the model is a random one
        agree(run(whole, range(2)), run(alone, range(2)), 0.05)
        factors, expected = dict(whole.factors()), alone.factors()
        assert list(factors) == list(expected)
        assert all(tensor.dtype == torch.float32 for tensor in factors.values())
        kinds = {name: tensor.dtype for name, tensor in whole.weights().items()}
        assert set(kinds.values()) == {torch.bfloat16}
        parts = keep(whole, tmp_path / "saved")
        assert tensors_of(parts).keys() == state_of(alone).keys()  # no master weights
        done = run(whole, [2])
    finally:
        whole.close()
    again = start(variant, str(tmp_path / "saved"), path, model=model, ranks=ranks)
    try:
        again.load_state(parts)
        assert run(again, [2]) == done
    finally:
        again.close()


@pytest.mark.parametrize("variant", ["deepspeed-2", "megatron"])
def test_adapters_of_a_few_layers(tmp_path, variant):
    path, lora = (
        kit.save_model(tmp_path / "first"),
        {"target_modules": ["v_proj", "gate_proj", "o_proj"]},
    )
    one, alone = start(variant, path, lora=lora, ranks=1), start("torch", path, lora=lora)
    try:
        agree(run(one, range(3)), run(alone, range(3)))
        found, expected = dict(one.factors()), alone.factors()
        assert list(found) == list(expected)
        for name, factor in expected.items():
            torch.testing.assert_close(found[name], factor, rtol=0, atol=1e-5)
    finally:
        one.close()


def agree(found, expected, tolerance=1e-5):
    for one, wanted in zip(found, expected, strict=True):
        for name in NAMES:
            assert one[name] == pytest.approx(wanted[name], rel=tolerance, abs=tolerance), name
