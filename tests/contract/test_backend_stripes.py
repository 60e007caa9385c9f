"""Real backends on several ranks send what each holds; a server receives the weights that training
has now.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import backend_kit
import pytest
import torch
import torch_backend_kit as kit
from torch import Tensor

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.weights.memory.staging import FlatBuffer
from broker.weights.receiver.receive import WeightReceiver
from learner.backends.section_checks import check_stripes
from learner.config import TrainSection
from learner.weights.offering import WeightOffering
from rlearner_text.config import ModelSection


class AnyServer(Roster):
    """A roster in which the server is always present."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, beats=("rollout",), members=())

    def alive(self, role: str) -> list[wire.Presence]:
        return [wire.Presence(role=role, id="r1", host="h", pid=1, state="serving")]


FOUR = {
    "tp2-dp2": {"tensor_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}


@pytest.mark.parametrize(
    ("variant", "ranks", "dtype", "layout", "tied"),
    [
        ("ddp", 2, None, None, True),
        ("fsdp2", 3, "bfloat16", None, True),
        ("deepspeed-2", 2, None, None, True),
        ("deepspeed-3", 2, None, None, True),
        ("megatron", 2, None, None, True),
        ("megatron", 4, None, "tp2-dp2", True),
        ("megatron", 4, "bfloat16", "tp2-dp2", False),
        ("megatron", 4, None, "tp2-pp2", True),
        ("megatron", 4, None, "tp2-pp2", False),
    ],
)
async def test_every_rank_sends_a_part_of_the_weights_after_each_step(
    bus: Bus,
    tmp_path: Path,
    variant: str,
    ranks: int,
    dtype: str | None,
    layout: str | None,
    tied: bool,
) -> None:
    options = {
        "weights_stripes": "always",
        "weights_dtype": dtype,
        "weights_bucket_mib": 4096 / 2**20,
    }
    path, model = kit.save_model(tmp_path / "model", kv_heads=2, tied=tied), ModelSection()
    if layout is not None:
        options["megatron"] = FOUR[layout]
        model = ModelSection(dtype=dtype or "float32")
    backend = backend_kit.make(variant, path, ranks=ranks, model=model, **options)
    try:
        offering = WeightOffering(backend, backend._context.train, "float32")
        sender = offering.sender(bus, AnyServer(bus), 1)
        assert sender.plan.digest
        assert offering._stripes is not None
        sizes = [stripe.size_bytes for stripe in offering._stripes.plans]
        assert max(sizes) < 1.4 / ranks * sender.plan.size_bytes
        held = {name: torch.zeros(tensor.shape) for name, tensor in backend.shapes().items()}
        loaded: list[int] = []

        async def load(tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
            for name, tensor in tensors.items():
                held[name].copy_(tensor)
            loaded.append(offer.version)

        bucket_mib = backend._context.train.weights_bucket_mib
        receiver = WeightReceiver(bus, "r1", held, load, bucket_mib=bucket_mib, dtype=dtype)
        await sender.start()
        offering.serve(sender)
        await receiver.start()
        try:
            for version in range(3):
                backend_kit.run(backend, [version])
                sender.offer(version, offering.tensors(), offering.probe())
                whole = FlatBuffer(sender.plan)
                whole.fill(backend.weights())
                await receiver.wait_for(version)
                expected = {name: tensor.float() for name, tensor in whole.tensors.items()}
                assert all(torch.equal(held[name], expected[name]) for name in expected)
                assert receiver._state.digest == whole.digest()
            assert loaded == [0, 1, 2]
            assert sender.metrics()["weights/sent_bytes"] == sizes[0]
        finally:
            await receiver.close()
            await sender.close()
    finally:
        backend.close()


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"ranks": 1}, "train.ranks above 1"),
        ({"weights_dtype": "fp8"}, "train.weights_dtype other than fp8"),
        ({"weights_delta": True}, "train.weights_delta false"),
        ({"weights_snapshot_every": 5}, "train.weights_snapshot_every 0"),
        ({"weights_backend": "curve"}, "train.weights_backend auto, nccl or gloo"),
        ({"lora": {"rank": 4}}, "no train.lora"),
    ],
)
def test_what_excludes_stripes_is_named(settings: dict[str, object], allowed: str) -> None:
    train = TrainSection(**{"backend": "ddp", "ranks": 2, "weights_stripes": "always", **settings})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError,
        match=rf"^train\.weights_stripes: 'always' is not allowed; auto or never, or {allowed}",
    ):
        check_stripes(train)
    check_stripes(train.model_copy(update={"weights_stripes": "auto"}))


async def test_a_backend_that_cannot_is_refused_where_it_must(bus: Bus, tmp_path: Path) -> None:
    train = TrainSection(backend="torch", device="cpu", weights_stripes="always")
    backend = kit.backend(kit.save_model(tmp_path / "model"), train=train)
    with pytest.raises(
        ConfigError,
        match=r"^train\.weights_stripes: 'always' is not allowed; auto or never with train\.backend torch$",
    ):
        WeightOffering(backend, train, "float32").sender(bus, AnyServer(bus), 1)
