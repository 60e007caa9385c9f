"""Adapters, a reference without weights of its own and an offloaded optimizer on two ranks: as one process, and the same bits on resume."""

import os

import numpy as np
import pytest
import torch
from backend_kit import kit, run

from broker.registry import resolve
from broker.weights.adapter import Merged, factor_shapes
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from text.config import ModelSection

pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

NAMES = ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
IDS = np.arange(9)


def start(name, path, first=None, **more):
    settings = {"lr": 1e-2, "device": "cpu", "num_threads": 1, "micro_batch_tokens": 60, "lora": {"rank": 4, "alpha": 8}, **more}
    train = TrainSection.model_validate({**settings, "backend": name, "ranks": 1 if name == "torch" else 2})
    algorithm, backend = AlgorithmSection(kl_coef=0.2), resolve("backends", name, BACKENDS)
    return backend(path, train=train, algorithm=algorithm, model=ModelSection(), seed=0, ref_path=first)


@pytest.mark.timeout(600)
@pytest.mark.skipif("RL_OPTIONS" not in os.environ, reason="three times two processes: make test-options")
def test_two_ranks_train_adapters_as_one_does(tmp_path):
    path = kit.save_model(tmp_path / "first")
    alone = start("torch", path)
    expected = run(alone, range(4))
    written, options = tmp_path / "checkpoint", {"optimizer_offload": True, "activation_offload": True}
    whole = start("fsdp2", path, **options)
    try:
        found = run(whole, range(2))
        snapshot = whole.snapshot()
        whole.save(written, snapshot.weights)
        probe = whole.logprobs(IDS)
        found += run(whole, range(2, 4))
        weights = dict(whole.weights())
        shapes = whole.shapes()
        adapter, factors = whole.adapter(), dict(whole.factors())
    finally:
        whole.close()
    agree(found, expected)
    assert expected[3]["actor/kl_loss"] > 1e-4
    assert list(weights) == list(alone.weights()) == list(shapes)
    for name, tensor in alone.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
    assert any(name.startswith("base_model.model.") for name in snapshot.weights)
    assert adapter is not None
    assert adapter == alone.adapter()  # the digest of the weights below, too
    assert {name: tensor.shape for name, tensor in factors.items()} == {
        name: tensor.shape for name, tensor in factor_shapes(shapes, adapter.targets, adapter.rank).items()
    }
    base = kit.backend(path).weights()
    for name, tensor in Merged(base, factors, adapter.targets, adapter.scale).made().items():
        assert torch.equal(tensor, weights[name])

    again = start("fsdp2", str(written), path, **options)
    try:
        again.load_state(snapshot.state)
        assert run(again, range(2, 4)) == found[2:]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in again.weights().items())
    finally:
        again.close()
    other = start("ddp", str(written), path)  # another layout, and an optimizer that is not offloaded
    try:
        other.load_state(snapshot.state)
        torch.testing.assert_close(other.logprobs(IDS), probe, rtol=0, atol=1e-6)
        agree(run(other, range(2, 4)), expected[2:])
    finally:
        other.close()


def agree(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        for name in NAMES:
            assert one[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-5), name
