"""Where a receiver takes its buckets, decided by the offer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
import pytest
import torch

from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights.carriers.selection import MAX_LOST
from broker.weights.memory.shared import SharedSegment
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.receiver.buffers import IncomingVersion
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.snapshots.snapshot import SnapshotManifest


async def load(tensors: Mapping[str, torch.Tensor], offer: wire.WeightsOffer) -> None:
    raise AssertionError("nothing is loaded here")


def receiver() -> WeightReceiver:
    return WeightReceiver(cast(Any, None), "r1", {"w": torch.zeros(10)}, load, bucket_mib=1)


def test_gloo_arrives_on_the_cpu_and_the_buffer_is_kept() -> None:
    made = receiver()
    loader = made._loader
    digest = loader._buffers.hold(made.plan, loader._tensors, loader._device)
    first = loader.take(made.plan)
    assert first.flat.buffer.device.type == "cpu"
    assert first.held == digest == first.flat.digest()
    assert loader.take(made.plan).flat is not first.flat  # until the transfer has succeeded
    loader._buffers.arrived(first, "d")
    assert loader.take(made.plan) == IncomingVersion(first.flat, first.flat, "d")


def test_nothing_is_served_before_the_first_version() -> None:
    assert receiver().served == (0, -1)
    assert receiver().metrics() == {
        "weights/version": -1.0,
        "weights/failures": 0.0,
        "weights/failed_loads": 0.0,
    }


async def test_a_snapshot_of_another_model_is_refused_with_the_first_difference() -> None:
    made, other = receiver(), plan_of({"w": torch.zeros(11)}, 1)
    probe = make_probe([1, 2], [-1.0], tolerance=0.1)
    offer = wire.WeightsOffer(
        epoch=1,
        version=5,
        digest="d",
        plan=other.digest,
        size_bytes=other.size_bytes,
        carriers=["gloo"],
        probe=probe,
    )
    why = (
        r"^snapshot here: epoch 1 version 5 is another model than the one here: w float32\[10\] "
        r"here is w float32\[11\] in the offer$"
    )
    with pytest.raises(TransferFailed, match=why):
        await made._wants(SnapshotManifest("r", offer, other, "f"), "here")
    assert await made._wants(
        SnapshotManifest(
            "r", msgspec.structs.replace(offer, plan=made.plan.digest), made.plan, "f"
        ),
        "here",
    )


async def test_memory_that_was_no_use_three_times_is_not_read_again() -> None:
    made = receiver()
    segment = SharedSegment(made.plan)
    probe = make_probe([1, 2], [-1.0], tolerance=0.1)
    offer = wire.WeightsOffer(
        epoch=1,
        version=5,
        digest="",
        plan=made.plan.digest,
        size_bytes=1,
        carriers=["shared", "gloo"],
        probe=probe,
    )
    assert made._look_over(offer) is None
    offer = msgspec.structs.replace(offer, segment=segment.address)
    window = made._look_over(offer)
    assert window is not None
    assert made._takes(offer, window) == {"shared": 1, "gloo": 1, "curve": 1}
    made._lost["shared"] = MAX_LOST
    assert made._takes(offer, window) == {"gloo": 1, "curve": 1}
    later = msgspec.structs.replace(offer, epoch=2)  # another learner
    assert list(made._takes(later, window)) == ["shared", "gloo", "curve"]
    await made.close()
