"""SGLang's workers join the learner's transfer by the plugin that they load: bytes, versions in
flight, failures.
"""

# ruff: noqa: F811 - fixtures come by import

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import sglang_updater
import torch
from engine_kit import PROMPT, ask
from sglang_double import Double
from sglang_kit import config, logprobs_under, model_path, scaled, server, trained  # noqa: F401 - fixtures among them
from waits import until

from broker.contract import wire
from broker.errors import ConfigError, TransferFailed, UserError
from broker.jetstream.bus import Bus
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.protocol.session import TransferSettings
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.receiver.workers import WorkerReceiver
from broker.weights.sender.send import WeightSender
from rollout.engine_workers import engine_workers
from rollout.engines.base import NO_VERSION, EngineConfig
from rollout.engines.hf.model import SlotModel
from rollout.engines.sglang import plugin
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.worker_transfer import num_workers


def settings(
    model_path: str, server: Double, mode: str = "keep", into: str = "workers"
) -> EngineConfig:
    made = config(model_path, server.command)
    section = made.section.model_copy(update={"update_mode": mode, "weights_into": into})
    return dataclasses.replace(made, section=section)


@pytest.fixture
def with_plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sglang_updater.pretend_modules(monkeypatch)
    receivers: dict[int, WorkerReceiver] = {}
    monkeypatch.setattr(plugin, "_receivers", receivers)
    plugin.register()
    yield
    for receiver in receivers.values():  # as its process ends
        receiver.cancel("the process ends")
        receiver.close()


async def no_load(tensors: Mapping[str, torch.Tensor], offer: wire.WeightsOffer) -> None:
    raise AssertionError("the server's process receives nothing")


@asynccontextmanager
async def channel(
    bus: Bus, engine: SGLangEngine, mode: Any, carriers: tuple[wire.Carrier, ...] = ("gloo",)
) -> AsyncIterator[tuple[WeightSender, WeightReceiver]]:
    held = engine.weights()
    sender = WeightSender(
        bus, plan_of(held, 1), epoch=1, settings=TransferSettings(carriers), gather_s=0.0
    )
    workers = await engine_workers(engine, mode, lambda _: None)
    assert workers is not None
    assert list(workers.carriers.items()) == [("shared", 1), ("gloo", 1)]
    receiver = WeightReceiver(bus, "r1", held, no_load, bucket_mib=1, workers=workers)
    await sender.start()
    await receiver.start()
    try:
        yield sender, receiver
    finally:
        await receiver.close()
        await sender.close()


@pytest.mark.usefixtures("with_plugin")
@pytest.mark.parametrize(
    ("mode", "carriers"),
    [
        ("keep", ("gloo",)),
        ("recompute", ("gloo",)),
        ("abort", ("gloo",)),
        ("recompute", ("shared", "gloo")),
    ],
)
async def test_each_token_has_the_weights_of_its_version_and_no_byte_goes_through_the_server(
    mode: Any, carriers: Any, bus: Bus, model_path: str, trained: SlotModel, server: Double
) -> None:
    engine = SGLangEngine(settings(model_path, server, mode))
    await engine.start()
    new = scaled(trained, 1.5)
    probe = make_probe(PROMPT, logprobs_under(trained, new, PROMPT), tolerance=1e-4)
    try:
        async with channel(bus, engine, mode, carriers) as (sender, receiver):
            running = asyncio.create_task(engine.generate(ask("long", max_tokens=120)))
            await server.stand(40)
            sender.offer(1, new, probe)
            await receiver.wait_for(1)
            server.go()
            output = await running
            assert sender.metrics()["weights/receivers"] == 1
            assert sender.metrics()["weights/shared"] == ("shared" in carriers)
        assert list(output.version_runs) == ([(0, 40)] if mode == "abort" else [(0, 40), (1, 80)])
        tokens, start = [*PROMPT, *output.token_ids], len(PROMPT) - 1
        old = logprobs_under(trained, scaled(trained, 1.0), tokens)[start:]
        assert np.abs(old[:40] - output.logprobs[:40]).max() < 1e-4
        if mode == "recompute":
            renewed = logprobs_under(trained, new, tokens)[start:]
            assert np.abs(renewed[40:] - output.logprobs[40:]).max() < 1e-4
        after = await engine.logprobs(PROMPT)
        assert np.abs(logprobs_under(trained, new, PROMPT) - after).max() < 1e-4
    finally:
        await engine.close()
    sent = server.asked("/update_weights_from_distributed")
    assert [(body["names"], body["weight_version"]) for body in sent] == [([], "1")]
    assert not server.asked("/update_weights_from_disk")


@pytest.mark.usefixtures("with_plugin")
@pytest.mark.parametrize("fault", ["probe", "as told refused"])
async def test_weights_that_were_not_loaded_well_hold_requests_until_the_next_are(
    fault: str, bus: Bus, model_path: str, trained: SlotModel, server: Double
) -> None:
    engine = SGLangEngine(settings(model_path, server))
    await engine.start()
    good, other = scaled(trained, 1.5), scaled(trained, 0.5)
    probe = make_probe(PROMPT, logprobs_under(trained, good, PROMPT), tolerance=1e-4)
    try:
        async with channel(bus, engine, "keep") as (sender, receiver):
            server.refuse = "" if fault == "probe" else "/update_weights_from_distributed"
            sender.offer(1, other, probe)
            await until(lambda: fault in receiver.last_error)
            server.refuse = ""
            assert engine.policy_version == NO_VERSION
            waiting = asyncio.create_task(engine.generate(ask("waits")))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            sender.offer(2, good, probe)
            await receiver.wait_for(2)
            assert list((await waiting).version_runs) == [(2, 12)]
    finally:
        await engine.close()


async def test_workers_without_the_plugin_are_refused_or_the_server_receives(
    model_path: str, server: Double, caplog: pytest.LogCaptureFixture
) -> None:
    engine = SGLangEngine(settings(model_path, server))
    with pytest.raises(
        UserError,
        match=r"rollout\.weights_into: workers is not possible; .*install rlearner in its env",
    ):
        await engine.start()
    engine = SGLangEngine(settings(model_path, server, into="auto"))
    await engine.start()
    assert engine.worker_carriers() == {}
    await engine.close()


@pytest.mark.usefixtures("with_plugin")
def test_another_group_is_sglangs_own() -> None:
    updater = sglang_updater.WeightUpdater(dict)
    assert updater.destroy_weights_update_group("other") == (
        False,
        "The group to be destroyed does not exist.",
    )
    assert updater.destroy_weights_update_group("rlearner") == (True, plugin.HERE)
    assert updater.load_weights_from_distributed([]) == (
        True,
        "Succeeded to update parameter online.",
    )


@pytest.mark.usefixtures("with_plugin")
def test_a_transfer_that_was_not_begun_or_cannot_be_read_says_so() -> None:
    updater = sglang_updater.WeightUpdater(dict)
    weights = updater.receive_weights_from_distributed(
        names=[], dtypes=[], shapes=[], group_name="rlearner"
    )
    assert updater.load_weights_from_distributed(weights) == (False, "no transfer was begun")
    done, message = updater.init_weights_update_group("/no/such/file", 0, 0, 1, "rlearner", "gloo")
    assert (done, "No such file" in message) == (False, True)


def test_one_worker_that_fails_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' word comes by a collective: here it says that one of them has failed."""
    sglang_updater.pretend_modules(monkeypatch, num_workers=2)
    monkeypatch.setattr(plugin, "_receivers", {0: Loaded()})
    plugin.register()
    heard: list[int] = []

    def all_reduce(flag: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        heard.append(int(flag.item()))
        flag.zero_()

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    updater = sglang_updater.WeightUpdater(dict)
    weights = updater.receive_weights_from_distributed(
        names=[], dtypes=[], shapes=[], group_name="rlearner"
    )
    done, message = updater.load_weights_from_distributed(weights)
    assert (done, message) == (
        False,
        "another worker could not load the weights, see the server's log",
    )
    assert heard == [1]


class Loaded:
    def load(self, load: Any) -> str:
        return "d"


@pytest.mark.parametrize(
    ("args", "copies", "into", "expected"),
    [
        ({"tensor_parallel": 4}, 1, "auto", 4),
        ({}, 2, "auto", 0),
        ({"flags": {"pp-size": 2}}, 1, "auto", 0),
        ({"flags": {"pp-size": 1}}, 1, "workers", 1),
        ({}, 2, "workers", "auto or server with 2 copies of the model"),
        (
            {"flags": {"pp-size": 2}},
            1,
            "workers",
            r"auto or server with engine_args\.flags\.pp-size",
        ),
    ],
)
def test_workers_receive_if_one_group_holds_them_all(
    args: dict[str, Any], copies: int, into: str, expected: int | str
) -> None:
    made = SGLangArgs.model_validate(args)
    if isinstance(expected, int):
        assert num_workers(made, copies, into) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            num_workers(made, copies, into)


async def test_a_transfer_that_cannot_begin_leaves_the_old_weights(
    with_plugin: None, model_path: str, server: Double
) -> None:
    engine = SGLangEngine(settings(model_path, server))
    await engine.start()

    async def go() -> None:
        raise AssertionError("nothing was begun")

    try:
        with pytest.raises(TransferFailed, match="/init_weights_update_group with 400"):
            await engine.receive_weights("no transfer", 1, "keep", None, go)
        assert list((await engine.generate(ask("x"))).version_runs) == [(0, 12)]
    finally:
        await engine.close()
