"""Engines that compute in another dtype than the learner trains in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from test_weights import StubRoster
from torch import Tensor
from torch_backend_kit import backend, samples, save_model

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.settings.runspec import validate
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.rounding import round_into
from learner.config import TrainSection
from learner.weights.offering import WeightOffering
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine import HFEngine

WAIT_S = 120.0  # a refused version never comes
PROBE = [1, 5, 3, 9, 22, 7, 7, 2]
LAKE = {
    "env": "frozenlake",
    "max_context_tokens": 64,
    "sampling": {"max_tokens": 4},
    "max_turns": 2,
}


@pytest.mark.parametrize("weights_dtype", [None, "float32"])
@pytest.mark.parametrize("delta", [False, True])
async def test_a_bfloat16_engine_follows_a_float32_learner(
    tmp_path: Path, bus: Bus, weights_dtype: str | None, delta: bool
) -> None:
    path = save_model(tmp_path / "model")
    config = validate(
        {
            "domains": {"lake": LAKE},
            "train": {"weights_dtype": weights_dtype, "weights_delta": delta, "lr": 1e-2},
            "rollout": {"dtype": "bfloat16"},
        }
    )
    dtype = config["train"]["weights_dtype"]
    assert dtype == (weights_dtype or "bfloat16")
    train = TrainSection.model_validate(
        {**config["train"], "device": "cpu", "micro_batch_tokens": 64, "weights_timeout_s": 10}
    )
    trainer = backend(path, train=train, model=ModelSection(dtype="float32"))
    offering = WeightOffering(trainer, train, "float32", engine_dtype="bfloat16")
    sender = offering.sender(bus, StubRoster("server"), 1)
    section = RolloutSection(max_running=2, max_context_tokens=64, num_threads=1)
    engine = HFEngine(
        EngineConfig(path, section, dtype="bfloat16", device="cpu", policy_version=-1)
    )

    async def load(tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        if tensors:
            await engine.update_weights(tensors, offer.version, "keep", offer.probe)
        else:
            await engine.adopt(offer.version)

    async with AsyncExitStack() as stack:
        await engine.start()
        stack.push_async_callback(engine.close)
        receiver = WeightReceiver(bus, "server", engine.weights(), load, dtype=dtype, kept=True)
        await receiver.start()
        stack.push_async_callback(receiver.close)
        await sender.start()
        stack.push_async_callback(sender.close)
        for version in range(3):
            if version:
                trainer.update(samples(version))
            assert offering.probe().tolerance == 0.25
            sender.offer(version, offering.tensors(), offering.probe())
            await asyncio.wait_for(receiver.wait_for(version), WAIT_S)
        assert sender.metrics()["weights/failures"] == 0
        weights = engine.weights()
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        trained = trainer.weights()
        assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
        for name, tensor in weights.items():
            wanted = torch.empty_like(tensor)
            round_into(wanted, trained[name])
            assert torch.equal(tensor, wanted)
        logprobs = torch.from_numpy(await engine.logprobs(PROBE))
        torch.testing.assert_close(logprobs, trainer.logprobs(PROBE), atol=0.1, rtol=0)
