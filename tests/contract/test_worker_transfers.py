"""An engine's two workers as members of a transfer, each in a thread of this process with a
receiver of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack

import pytest
import torch
from test_striped_weights import Ranks
from test_weights import SETTINGS, Spawn, ready, spawn  # noqa: F401  # fixture
from torch import Tensor
from waits import until
from weights_model import content, make_tensors, probe_logprobs, probe_of

from broker.contract import wire
from broker.errors import TransferFailed
from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.probe import check_probe
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.receiver.workers import EngineWorkers, WorkerReceiver, WorkerTransfer
from broker.weights.sender.send import WeightSender

PLAN = plan_of(make_tensors(0), 1)
CPU = torch.device("cpu")


class Workers:
    """An engine with two workers, which load what they receive into models of their own."""

    def __init__(self, *carriers: wire.Carrier) -> None:
        self.carriers = carriers or ("gloo",)
        self.workers = [WorkerReceiver(number, CPU) for number in range(2)]
        self.models = [make_tensors(0) for _ in self.workers]
        self.broken = False

    def named(self) -> EngineWorkers:
        return EngineWorkers(dict.fromkeys(self.carriers, len(self.workers)), self.receive)

    async def receive(
        self, transfer: WorkerTransfer, offer: wire.WeightsOffer, go: Callable[[], Awaitable[None]]
    ) -> str:
        text = transfer.text()
        for worker in self.workers:
            worker.begin(text)
        await go()
        digests = await asyncio.gather(
            *(asyncio.to_thread(self.load, number) for number in range(2))
        )
        for model in self.models:
            check_probe(offer.probe, probe_logprobs(model))
        return digests[0]

    def load(self, number: int) -> str:
        def load(tensors: list[tuple[str, Tensor]]) -> None:
            if self.broken and number == 1:
                raise RuntimeError("out of memory")
            for name, tensor in tensors:
                self.models[number][name].copy_(tensor)

        return self.workers[number].load(load)


async def unused(tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
    raise AssertionError("the server's process receives nothing")


@pytest.fixture(params=["whole", "stripes"])
async def sender(
    bus: Bus, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[WeightSender, Ranks | None]]:
    ranks = Ranks() if request.param == "stripes" else None
    made = WeightSender(bus, PLAN, epoch=1, settings=SETTINGS, stripes=ranks)
    await made.start()
    with ExitStack() as stack:
        if ranks is not None:
            ranks.serve(made, stack)
        yield made, ranks
    await made.close()


def offer(sender: tuple[WeightSender, Ranks | None], version: int, seed: int) -> str:
    tensors = make_tensors(seed)
    if sender[1] is not None:
        sender[1].tensors = tensors
    sender[0].offer(version, tensors, probe_of(tensors))
    return content(tensors)


async def test_workers_are_ranks_next_to_other_servers(
    bus: Bus,
    sender: tuple[WeightSender, Ranks | None],
    spawn: Spawn,  # noqa: F811
) -> None:
    engine, other = Workers(), await spawn("r2")
    await ready(other)
    receiver = WeightReceiver(
        bus, "r1", make_tensors(0), unused, bucket_mib=1, settings=SETTINGS, workers=engine.named()
    )
    await receiver.start()
    try:
        for version in range(3):
            expected = offer(sender, version, 50 + version)
            await receiver.wait_for(version)
            assert [content(model) for model in engine.models] == [expected] * 2
            assert (await other.hears(event="loaded", version=version))["content"] == expected
        assert sender[0].metrics()["weights/communicators"] == 1
        assert sender[0].metrics()["weights/receivers"] == 2

        engine.broken = True
        offer(sender, 3, 60)
        await until(lambda: "out of memory" in receiver.last_error)
        engine.broken = False
        expected = offer(sender, 4, 61)
        await receiver.wait_for(4)
        assert [content(model) for model in engine.models] == [expected] * 2
        assert (await other.hears(event="loaded", version=4))["content"] == expected
    finally:
        await receiver.close()
        for worker in engine.workers:
            worker.cancel("the test ends")
            worker.close()


async def test_workers_read_the_memory_of_a_learner_on_their_host(bus: Bus, spawn: Spawn) -> None:  # noqa: F811
    made = WeightSender(
        bus, PLAN, epoch=1, settings=dataclasses.replace(SETTINGS, carriers=("shared", "gloo"))
    )
    await made.start()
    engine, other = Workers("shared", "gloo"), await spawn("r2")
    await ready(other)
    receiver = WeightReceiver(
        bus, "r1", make_tensors(0), unused, bucket_mib=1, settings=SETTINGS, workers=engine.named()
    )
    await receiver.start()
    try:
        for version in range(3):
            expected = offer((made, None), version, 50 + version)
            await receiver.wait_for(version)
            assert [content(model) for model in engine.models] == [expected] * 2
            assert (await other.hears(event="loaded", version=version))["content"] == expected
        assert (made.metrics()["weights/receivers"], made.metrics()["weights/shared"]) == (2, 2)
        engine.broken = True
        offer((made, None), 3, 60)
        await until(lambda: "out of memory" in receiver.last_error)
        engine.broken = False
        expected = offer((made, None), 4, 61)
        await receiver.wait_for(4)
        assert [content(model) for model in engine.models] == [expected] * 2
    finally:
        await receiver.close()
        for worker in engine.workers:
            worker.cancel("the test ends")
            worker.close()
        await made.close()


def test_a_worker_without_a_transfer_says_so_and_keys_are_not_shown() -> None:
    with pytest.raises(TransferFailed, match="no transfer was begun"):
        WorkerReceiver(0, CPU).load(lambda tensors: None)
    session = wire.WeightsSession(
        session="1-1.0",
        rank=1,
        world_size=3,
        host="h",
        port=1,
        key="k" * 40,
        version=0,
        timeout_s=1.0,
    )
    transfer = WorkerTransfer(session, "", PLAN.text, "", "p" * 40, "s3cret", 1.0)
    assert "s3cret" not in f"{transfer} {transfer!r} {[transfer]}"
