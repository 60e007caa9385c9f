"""An engine's workers in a transfer: tensors in passing, and what a worker holds of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_model import make_tensors

from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights.carriers.selection import worker_carriers
from broker.weights.group import WaitMonitor
from broker.weights.memory.shared import SharedSegment
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.probe import make_probe
from broker.weights.protocol.session import session_before
from broker.weights.receiver.bucket_stream import MOST_BUCKETS, BucketStream
from broker.weights.receiver.workers import EngineWorkers
from broker.weights.store_messages import StoreMessages

CPU = torch.device("cpu")
LINES = cast(StoreMessages, None)


def streamed(
    tensors: dict[str, torch.Tensor], bucket_mib: float, order: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Send a model through a stream; buckets complete in an order of at most three at a time."""
    flat = FlatBuffer(plan_of(tensors, bucket_mib))
    flat.fill(tensors)
    stream, loaded = (
        BucketStream(flat.plan, CPU).incoming(LINES, whole=True),
        dict[str, torch.Tensor](),
    )

    def receive() -> None:
        waiting: list[int] = []
        following = 0
        picks = iter(order)
        while following < len(stream) or waiting:
            while (
                following < len(stream)
                and len(waiting) < 3
                and (bucket := stream[following]) is not None
            ):
                bucket.copy_(flat.bucket(following))
                waiting.append(following)
                following += 1
            if waiting:
                index = waiting.pop(next(picks, 0) % len(waiting))
                assert torch.equal(stream.arrived(index), flat.bucket(index))
        stream.end()

    thread = threading.Thread(target=receive)
    thread.start()
    for batch in stream.tensors(WaitMonitor(), 10.0):
        loaded |= {name: tensor.clone() for name, tensor in batch}
    thread.join()
    return loaded


@given(
    sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    order=st.lists(st.integers(0, 2), max_size=60),
)
@settings(max_examples=60, deadline=None)
def test_every_tensor_comes_once_and_whole(sizes: list[int], order: list[int]) -> None:
    tensors = {f"t{number:02d}": torch.randn(size) for number, size in enumerate(sizes)}
    loaded = streamed(tensors, 4096 / 2**20, order)  # the smallest bucket: a tensor may span five
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_a_real_model_with_several_dtypes() -> None:
    tensors = make_tensors(3)
    assert all(
        torch.equal(tensor, tensors[name]) for name, tensor in streamed(tensors, 1, ()).items()
    )


def test_only_a_few_buckets_are_in_memory_until_they_are_loaded() -> None:
    plan = plan_of({"w": torch.zeros(20 * 1024)}, 4096 / 2**20)
    stream = BucketStream(plan, CPU)
    assert len(stream) == 20 > MOST_BUCKETS
    for index in range(MOST_BUCKETS):
        assert stream[index] is not None
        stream.arrived(index)
    assert stream[MOST_BUCKETS] is None
    batches = stream.tensors(WaitMonitor(), 10.0)
    assert next(batches) == []  # no tensor is complete
    assert stream[MOST_BUCKETS] is None
    next(batches)  # so the first has been loaded
    assert stream[MOST_BUCKETS] is not None


def test_changes_cannot_be_taken_and_silence_ends_the_wait() -> None:
    stream = BucketStream(plan_of({"w": torch.zeros(10)}, 1), CPU)
    with pytest.raises(TransferFailed, match="sends only changes"):
        stream.incoming(LINES, whole=False)
    with pytest.raises(TransferFailed, match=r"no bucket came within 0\.1 s"):
        next(stream.tensors(WaitMonitor(), 0.1))


def test_workers_take_what_their_host_and_their_gpus_allow() -> None:
    async def receive(*_: object) -> str:
        raise AssertionError("nothing is received here")

    every = worker_carriers("workers", 2, on_gpu=True)
    assert list(every) == ["ipc", "nccl", "shared", "gloo"]
    workers = EngineWorkers(every, receive, frozenset({"GPU-1", "GPU-2"}))
    probe, segment = (
        make_probe([1, 2], [-1.0], tolerance=0.1),
        SharedSegment(plan_of({"w": torch.zeros(10)}, 1)),
    )
    near = wire.WeightsOffer(
        epoch=1, version=5, digest="", plan="p", size_bytes=1, carriers=["nccl", "gloo"], probe=probe,
        devices=["GPU-3"], segment=segment.address,
    )  # fmt: skip
    assert workers.takes(near) == every
    far = msgspec.structs.replace(
        near, segment=segment.address.replace("rlearner-weights-", "rlearner-weights-f")[:-1]
    )
    assert workers.takes(far) == {"nccl": 2, "gloo": 2}
    assert workers.takes(msgspec.structs.replace(far, devices=["GPU-2"])) == {"gloo": 2}
    adapter = wire.Adapter(base="b", targets=["w"], rank=1, scale=1.0)
    assert workers.takes(msgspec.structs.replace(near, adapter=adapter)) == {}
    assert (worker_carriers("auto", 2, on_gpu=True), worker_carriers("auto", 2, on_gpu=False)) == (
        {"ipc": 2, "nccl": 2},
        {},
    )
    assert (
        worker_carriers("server", 2, on_gpu=True),
        worker_carriers("workers", 1, on_gpu=False),
    ) == (
        {},
        {"shared": 1, "gloo": 1},
    )


def test_the_word_to_begin_stays_until_the_next_transfer_for_a_server_that_looks_late() -> None:
    store, watch = torch.distributed.HashStore(), WaitMonitor()  # type: ignore[attr-defined]
    first, second = (StoreMessages(store, f"1-1.{uses}", watch) for uses in range(2))
    for lines in (first, second):
        for word in ("ready/1", "go", "digest", "done/1"):
            lines.say(word)
        lines.forget(1, 0, session_before("1-1.0" if lines is first else "1-1.1"))
        assert [lines.heard(word) for word in ("ready/1", "go", "digest", "done/1")] == [
            None,
            "",
            None,
            None,
        ]
    assert first.heard("go") is None
