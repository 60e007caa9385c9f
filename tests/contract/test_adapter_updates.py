"""Adapters from a trainer to engines over the weight channel: what is sent, and that both compute
the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from waits import LONG_S, until

pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

from part_models import save_parts
from test_weights import StubRoster
from torch_backend_kit import backend, samples, save_model

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.settings.run_settings import RunSettings
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.sender.send import WeightSender
from learner.backends.torch import TorchBackend
from learner.config import TrainSection
from learner.weights.offering import WeightOffering
from rlearner_text.config import ModelSection
from rlearner_text.model_files import LocalModel
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine import HFEngine
from rollout.engines.hf.model import load_model
from rollout.engines.hf.weights import HeldWeights
from rollout.service import RolloutService

PROBE = [1, 5, 3, 9, 22, 7, 7, 2]


def trainer_of(
    path: str, dtype: str = "float32", weights_dtype: str | None = None, **lora: object
) -> TorchBackend:
    settings = {
        "lr": 1e-2,
        "device": "cpu",
        "micro_batch_tokens": 64,
        "weights_dtype": weights_dtype,
    }
    train = TrainSection.model_validate({**settings, "lora": {"rank": 2, "alpha": 6, **lora}})
    return backend(path, train=train, model=ModelSection(dtype=dtype))


@asynccontextmanager
async def sender_of(
    bus: Bus, trainer: TorchBackend, dtype: str = "float32"
) -> AsyncIterator[tuple[WeightSender, WeightOffering]]:
    offering = WeightOffering(trainer, TrainSection.model_validate({"device": "cpu"}), dtype)
    sender = offering.sender(bus, StubRoster("s", "s0", "s1", "late"), 1)
    await sender.start()
    yield sender, offering
    await sender.close()


class Server:
    """An engine and its receiver, joined as in ``rollout.service``."""

    def __init__(
        self,
        bus: Bus,
        name: str,
        path: str,
        dtype: str = "float32",
        weights_dtype: str | None = None,
        *,
        first: str | None = None,
    ) -> None:
        self.bus, self.name, self.weights_dtype, self.first = bus, name, weights_dtype, first
        self.config = EngineConfig(
            path,
            RolloutSection(max_running=2, max_context_tokens=64, num_threads=1),
            dtype=dtype,
            device="cpu",
            policy_version=-1,
        )
        self.engine = HFEngine(self.config)
        self.seen: list[Mapping[str, Tensor]] = []

    async def start(self, stack: AsyncExitStack) -> Server:
        await self.engine.start()
        stack.push_async_callback(self.engine.close)
        held = self.engine.weights()
        self.receiver = WeightReceiver(
            self.bus,
            self.name,
            held,
            self.load,
            bucket_mib=32,
            dtype=self.weights_dtype,
            first=self.base,
        )
        await self.receiver.start()
        stack.push_async_callback(self.receiver.close)
        return self

    def base(self) -> tuple[Mapping[str, Tensor], bool]:
        if self.first is None:
            return self.engine.weights(), False
        return HeldWeights(load_model(self.config, torch.device("cpu"))).tensors(), True

    async def load(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        self.seen.append(tensors)
        if tensors:
            await self.engine.update_weights(tensors, offer.version, "keep", offer.probe)
        else:
            await self.engine.adopt(offer.version)


@pytest.mark.parametrize(
    ("dtype", "weights_dtype"), [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)]
)
async def test_what_is_sent_is_the_adapter_and_the_engine_computes_as_the_trainer(
    tmp_path: Path, bus: Bus, dtype: str, weights_dtype: str | None
) -> None:
    """Factors travel as they are, also where a whole model would be cast on the way."""
    path = save_model(tmp_path)
    trainer = trainer_of(path, dtype, weights_dtype)
    whole = sum(tensor.nbytes for tensor in trainer.weights().values())
    async with sender_of(bus, trainer, dtype) as (sender, offering), AsyncExitStack() as stack:
        servers = [
            await Server(bus, f"s{i}", path, dtype, weights_dtype).start(stack) for i in range(2)
        ]
        factors = sum(factor.nbytes for factor in offering.tensors().values())
        assert factors * 4 < whole
        for version in range(3):
            if version:
                trainer.update(samples(version))
            sender.offer(version, offering.tensors(), offering.probe())
            for server in servers:
                await server.receiver.wait_for(version)
        late = await Server(bus, "late", path, dtype, weights_dtype, first=path).start(stack)
        await late.receiver.wait_for(2)
        expected, merged = trainer.logprobs(PROBE), trainer.weights()
        assert (
            sender.plan.size_bytes - 64 * len(sender.plan.slots)
            <= factors
            <= sender.plan.size_bytes
        )
        assert sender.metrics()["weights/sent_bytes"] == sender.plan.size_bytes
        for server in (*servers, late):
            held = server.engine.weights()
            # to the bit: both merge by the same function
            assert all(torch.equal(held[name], merged[name]) for name in held)
            found = torch.from_numpy(await server.engine.logprobs(PROBE))
            torch.testing.assert_close(
                found, expected, atol=1e-5 if dtype == "float32" else 0.1, rtol=0
            )
        # it has learned something
        assert (trainer.logprobs(PROBE) - backend(path).logprobs(PROBE)).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
async def test_factors_of_stacked_experts_are_merged_by_the_server(
    tmp_path: Path, bus: Bus, name: str
) -> None:
    path = save_parts(name, tmp_path / "model")
    trainer = trainer_of(path)
    async with sender_of(bus, trainer) as (sender, offering), AsyncExitStack() as stack:
        server = await Server(bus, "s", path).start(stack)
        assert offering.adapter is not None
        assert any("experts" in target for target in offering.adapter.targets)
        assert (name == "gpt_oss") == bool(offering.adapter.transposed)
        trainer.update(samples(1))
        sender.offer(1, offering.tensors(), offering.probe())
        await server.receiver.wait_for(1)
        held, merged = server.engine.weights(), trainer.weights()
        assert held.keys() == merged.keys()
        assert all(torch.equal(held[name], merged[name]) for name in held)
        found = torch.from_numpy(await server.engine.logprobs(PROBE))
        torch.testing.assert_close(found, trainer.logprobs(PROBE), atol=1e-5, rtol=0)


async def test_a_server_with_another_model_below_is_refused_in_one_line(
    tmp_path: Path, bus: Bus
) -> None:
    path, other = save_model(tmp_path / "a"), save_model(tmp_path / "b", seed=1)
    trainer = trainer_of(path)
    async with sender_of(bus, trainer) as (sender, offering), AsyncExitStack() as stack:
        server = await Server(bus, "s", other).start(stack)
        sender.offer(0, offering.tensors(), offering.probe())
        await until(lambda: server.receiver.refused, LONG_S)
        assert server.receiver.refused.startswith(
            "the learner's adapters need another base: expected digest "
        )
        assert "\n" not in server.receiver.refused
        assert server.seen == []


async def test_other_layers_than_the_adapters_are_told_by_name(tmp_path: Path, bus: Bus) -> None:
    """As a server of another architecture would be: here the offer speaks of layers that it does
    not have.
    """
    path = save_model(tmp_path)
    trainer = trainer_of(path)
    async with sender_of(bus, trainer) as (sender, offering), AsyncExitStack() as stack:
        server = await Server(bus, "s", path).start(stack)
        assert sender._adapter is not None
        sender._adapter = wire.Adapter(
            base=sender._adapter.base, targets=["q_proj"], rank=2, scale=3.0
        )
        sender.offer(0, offering.tensors(), offering.probe())
        await until(lambda: server.receiver.refused, LONG_S)
        assert (
            "is another model than the one here: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
            in server.receiver.refused
        )


def test_a_server_finds_its_first_weights_in_the_engine_or_else_in_the_folder(
    tmp_path: Path,
) -> None:
    path = save_model(tmp_path)
    expected = backend(path).weights()
    spec = SimpleNamespace(config={}, model_path=path)
    held = {name: tensor.clone() for name, tensor in expected.items()}

    def first(
        loaded: bool, has_weights: bool = True, **engine: object
    ) -> tuple[Mapping[str, Tensor], bool]:
        parts = {
            "_spec": spec,
            "_settings": RunSettings(),
            "_section": RolloutSection(),
            "_model": LocalModel(path, has_weights=has_weights),
        }
        made = SimpleNamespace(_loaded=loaded, _engine=SimpleNamespace(**engine), **parts)
        return RolloutService._first_weights(made)  # type: ignore[arg-type]

    assert first(False, weights=lambda: held) == (held, False)
    assert first(False, weights=lambda: held, keeps_tensors=True) == (held, True)
    for loaded, weights in (
        (True, {"x": torch.zeros(1)}),
        (False, {"x": torch.zeros(1, device="meta")}),
    ):
        found, own = first(loaded, weights=lambda weights=weights: weights, keeps_tensors=True)
        assert own
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
    with pytest.raises(UserError, match="this host has only the configuration of"):
        first(True, has_weights=False, weights=lambda: held)


def test_merged_is_sent_where_it_is_asked_for(tmp_path: Path) -> None:
    trainer = trainer_of(save_model(tmp_path), send="merged")
    offering = WeightOffering(trainer, TrainSection.model_validate({"device": "cpu"}), "float32")
    assert offering.adapter is None
    assert offering.tensors().keys() == trainer.weights().keys()
