"""vLLM's two workers join the learner's transfer, each as a rank: bytes, versions of tokens in
flight, failures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import hf_models as models
import torch
from conftest import config_of
from vllm_kit import CLOSE, assert_reread, in_flight, prompt, renewed
from waits import until

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.protocol.session import TransferSettings
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.sender.send import WeightSender
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.engine_workers import engine_workers
from rollout.engines.base import GenerationOutput
from rollout.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")
TINY = TinyModel(
    hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=64, intermediate_size=2048
)


async def no_load(tensors: Mapping[str, torch.Tensor], offer: wire.WeightsOffer) -> None:
    raise AssertionError("the server's process receives nothing")


@pytest_asyncio.fixture(loop_scope="session")
async def channel(broker_url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(broker_url, f"workers-{os.getpid()}", name="test", deadline_s=60)
    await bus.ensure_streams()
    yield bus
    await bus.delete_streams()
    await bus.close()


def probe_of(model: object, tolerance: float = 1e-3) -> wire.Probe:
    ids = prompt(12)
    return make_probe(ids, models.logprobs(model, ids[:1], ids[1:]).numpy(), tolerance=tolerance)


async def spanning(engine: VLLMEngine, context: list[int]) -> GenerationOutput:
    """Generate until an output has tokens of two versions."""
    while True:
        task = await in_flight(engine, context)
        if len((output := await task).version_runs) == 2:
            return output
        assert engine.policy_version < 1, "the update fell between two requests"


@pytest.mark.parametrize(
    "carriers", [("gloo",), ("shared", "gloo")], ids=["gloo", "the learner's memory"]
)
async def test_each_worker_receives_and_loads_its_shard(
    channel: Bus, tmp_path: Path, carriers: Any
) -> None:
    folder = build_tiny(tmp_path / "model", TINY)
    args = {"tensor_parallel": 2, "kv_cache_gib": 0.1}
    engine = VLLMEngine(
        config_of(str(folder), weights_into="workers", update_mode="recompute", engine_args=args)
    )
    await engine.start()
    held = engine.weights()
    settings = TransferSettings(carriers)
    sender = WeightSender(channel, plan_of(held, 1), epoch=1, settings=settings, gather_s=0.0)
    pauses: list[float] = []
    workers = await engine_workers(engine, "recompute", pauses.append)
    assert workers is not None
    assert list(workers.carriers.items()) == [("shared", 2), ("gloo", 2)]
    receiver = WeightReceiver(channel, "r1", held, no_load, bucket_mib=1, workers=workers)
    try:
        await sender.start()
        await receiver.start()
        assert receiver.carriers()[:2] == ["shared", "gloo"]
        ids, context = prompt(30), prompt(11)
        old, (new, tensors) = models.load(folder), renewed(folder)
        task = asyncio.create_task(spanning(engine, context))
        sender.offer(1, tensors, probe_of(new))
        await receiver.wait_for(1)
        assert_reread(old, new, context, await task)
        expected = models.logprobs(new, ids[:1], ids[1:])
        torch.testing.assert_close(
            torch.tensor(await engine.logprobs(ids)), expected, atol=CLOSE, rtol=0
        )
        assert (sender.metrics()["weights/receivers"], sender.metrics()["weights/shared"]) == (
            1,
            "shared" in carriers,
        )
        assert len(pauses) == 1

        newest, others = renewed(folder, seed=2)
        sender.offer(2, others, probe_of(newest))  # in the same communicator
        await receiver.wait_for(2)
        assert sender.metrics()["weights/communicators"] == ("shared" not in carriers)
        expected = models.logprobs(newest, ids[:1], ids[1:])
        torch.testing.assert_close(
            torch.tensor(await engine.logprobs(ids)), expected, atol=CLOSE, rtol=0
        )

        # the probe is of other weights: nothing is served
        sender.offer(3, tensors, probe_of(newest))
        await until(lambda: "probe" in receiver.last_error)
        assert engine.policy_version == -1
        sender.offer(4, others, probe_of(newest))
        await receiver.wait_for(4)
        assert engine.policy_version == 4
    finally:
        await receiver.close()
        await sender.close()
        await engine.close()
