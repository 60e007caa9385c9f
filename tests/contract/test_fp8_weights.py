"""Weights that travel as FP8: everybody computes from the same ones, however they came, and the
learner says what these compute.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from test_shared_weights import SHARED, apart, loaded
from test_weights import Spawn, StubRoster, ready, spawn  # noqa: F401  # fixture
from torch import Tensor
from torch_backend_kit import backend, samples, save_model
from waits import until
from weights_model import content, make_tensors, probe_logprobs, probe_of

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.weights import fp8
from broker.weights.memory.staging import plan_of
from broker.weights.probe import check_probe
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.sender.send import WeightSender
from broker.weights.snapshots.publish import SnapshotPublisher
from broker.weights.snapshots.snapshot_source import SnapshotSource
from learner.config import TrainSection
from learner.weights.offering import WeightOffering
from learner.weights.snapshots import SnapshotServer
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine import HFEngine

SHAPES = {
    "embed": [300, 200],
    "layers.0.up.weight": [2000, 700],
    "layers.1.down.weight": [130, 2001],
    "norm": [1023],
}
PROBE = [1, 5, 3, 9, 22, 7, 7, 2]
KEY = "a-key-of-sixteen-or-more"


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: fp8.as_sent(name, tensor) for name, tensor in tensors.items()}


class Receiving:
    """A server of this process that copies what it is given."""

    def __init__(self, bus: Bus, name: str, held: dict[str, Tensor]) -> None:
        self.held = held
        self.receiver = WeightReceiver(bus, name, held, self.load, bucket_mib=1, dtype="fp8")

    async def load(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        for name, tensor in tensors.items():
            self.held[name].copy_(tensor)
        check_probe(offer.probe, probe_logprobs(self.held))


async def test_read_sent_changed_adopted_or_late_they_are_the_same_bits(
    bus: Bus,
    spawn: Spawn,  # noqa: F811
) -> None:
    tensors, generator = make_tensors(7, SHAPES), torch.Generator().manual_seed(0)
    options = {"tensors": SHAPES, "dtype": "fp8"}
    near, far = await spawn("near", **options), await spawn("far", **options, **await apart())
    same = Receiving(bus, "same", make_tensors(7, SHAPES))  # begins with what is version 0
    await asyncio.gather(ready(near, far), same.receiver.start())
    late, plan = Receiving(bus, "late", make_tensors(3, SHAPES)), plan_of(tensors, 1, dtype="fp8")
    sender = WeightSender(bus, plan, epoch=1, settings=SHARED, delta_full_every=100)
    await sender.start()

    async def offer(version: int) -> str:
        whole = rounded(tensors)
        await asyncio.to_thread(sender.offer, version, tensors, probe_of(whole))
        return content(whole)

    try:
        expected = await offer(0)
        assert await loaded(0, near, far) == {expected}
        await same.receiver.wait_for(0)
        assert content(same.held) == expected
        await until(lambda: not sender._membership.busy)
        assert sender.metrics()["weights/receivers"] == 2  # who held them made them by itself
        for version in (1, 2):
            for tensor in tensors.values():
                tensor[torch.rand(tensor.shape, generator=generator) < 0.01] *= 0.5
            expected = await offer(version)
            assert await loaded(version, near, far) == {expected}
            await same.receiver.wait_for(version)
            assert content(same.held) == expected
            # who has not confirmed yet gets the next version later than the others
            await until(lambda: not sender._membership.busy)
        metrics = sender.metrics()
        assert (
            metrics["weights/receivers"],
            metrics["weights/shared"],
            metrics["weights/failures"],
        ) == (3, 2, 0)
        assert (metrics["weights/deltas"], metrics["weights/sent_bytes"] < plan.size_bytes / 8) == (
            2,
            True,
        )
        await late.receiver.start()
        await late.receiver.wait_for(2)
        assert content(late.held) == expected
    finally:
        await asyncio.gather(same.receiver.close(), late.receiver.close())
        await sender.close()


class Server:
    """An engine and its receiver, joined as in ``rollout.service``."""

    def __init__(self, path: str, dtype: str) -> None:
        section = RolloutSection(max_running=2, max_context_tokens=64, num_threads=1)
        self.engine = HFEngine(
            EngineConfig(path, section, dtype=dtype, device="cpu", policy_version=-1)
        )

    async def start(
        self, stack: AsyncExitStack, bus: Bus, name: str, source: SnapshotSource | None = None
    ) -> None:
        await self.engine.start()
        stack.push_async_callback(self.engine.close)
        held, only = self.engine.weights(), source is not None
        self.receiver = WeightReceiver(
            bus,
            name,
            held,
            self.load,
            dtype="fp8",
            kept=True,
            snapshots=source,
            only_snapshots=only,
        )
        await self.receiver.start()
        stack.push_async_callback(self.receiver.close)

    async def load(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        await self.engine.update_weights(tensors, offer.version, "keep", offer.probe)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_computes_what_the_trainer_says_also_from_a_snapshot(
    tmp_path: Path, bus: Bus, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_API_KEY", KEY)
    path, folder = save_model(tmp_path / "model"), tmp_path / "snapshots"
    train = TrainSection(
        lr=1e-2, device="cpu", micro_batch_tokens=64, weights_dtype="fp8", weights_timeout_s=10
    )
    trainer = backend(path, train=train, model=ModelSection(dtype=dtype))
    offering = WeightOffering(trainer, train, dtype)
    sender = offering.sender(bus, StubRoster("first"), 1)
    sender.publisher = SnapshotPublisher(folder, bus.run, every=2)
    assert sender.plan.size_bytes < 0.6 * plan_of(trainer.shapes(), 32).size_bytes
    # as without FP8
    assert offering.probe().tolerance == {"float32": 5e-3, "bfloat16": 0.25}[dtype]
    async with AsyncExitStack() as stack:
        await sender.start()
        stack.push_async_callback(sender.close)
        first, files, web = (Server(path, dtype) for _ in range(3))
        await first.start(stack, bus, "first")
        for version in range(3):
            if version:
                trainer.update(samples(version))
            sender.offer(version, offering.tensors(), offering.probe())
            await first.receiver.wait_for(version)
        assert sender.metrics()["weights/failures"] == 0
        await sender.publisher.close()
        server = SnapshotServer(folder)
        await server.start("127.0.0.1", 0)
        stack.push_async_callback(server.close)
        await files.start(stack, bus, "files", SnapshotSource(str(folder)))
        await web.start(stack, bus, "web", SnapshotSource(server.address, KEY))
        expected, sent = trainer.logprobs(PROBE), rounded(trainer.weights())
        for one in (first, files, web):
            await one.receiver.wait_for(2)
            held = one.engine.weights()
            assert all(torch.equal(held[name], sent[name]) for name in held)
            found = torch.from_numpy(await one.engine.logprobs(PROBE))
            torch.testing.assert_close(
                found, expected, atol=1e-5 if dtype == "float32" else 0.1, rtol=0
            )
