"""The learner's memory as another process sees it: what is read is one version, or nothing."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from broker.errors import TransferFailed
from broker.weights.digest import combine
from broker.weights.group import WaitMonitor
from broker.weights.memory.shared import (
    F_SEAL_FUTURE_WRITE,
    LocalLearner,
    SegmentReader,
    SharedSegment,
    size_of,
)
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of
from broker.weights.sender import transfer
from broker.weights.sender.membership import StartTransfer
from broker.weights.store_messages import StoreMessages

PLAN = plan_of({"a": torch.zeros(100_000), "b": torch.zeros(300_001)}, 0.25)


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {slot.spec.name: torch.rand(slot.spec.shape, generator=generator) for slot in PLAN.slots}


def read(
    window: SegmentReader,
    version: int,
    done: Callable[[int], None] = lambda index: None,
    timeout_s: float = 60.0,
) -> tuple[FlatBuffer, str]:
    flat = FlatBuffer(PLAN)
    return flat, combine(
        window.take(
            version, flat.bucket, WaitMonitor(), timeout_s=timeout_s, done=done, peek=lambda: None
        )
    )


def test_versions_are_read_as_they_are_packed_and_whole() -> None:
    segment = SharedSegment(PLAN)
    staging, window = StagingBuffers(PLAN, memory=segment), SegmentReader(segment.address, PLAN)
    for version in range(4):
        given, held = tensors(version), threading.Event()

        class Late(dict[str, torch.Tensor]):
            def get(self, name: str, default: object = None) -> torch.Tensor:
                if name == "b":
                    assert held.wait(60)  # noqa: B023  # until the reader has taken what there is of "a"
                return self[name]

        begun = threading.Event()
        writer = threading.Thread(target=staging.write, args=(version, Late(given), begun.set))
        writer.start()
        assert begun.wait(60)
        flat, digest = read(window, version, done=lambda index: held.set())  # noqa: B023
        writer.join()
        assert digest == staging.digest(version)
        for name, tensor in given.items():
            assert torch.equal(flat.tensors[name], tensor)


def test_one_that_is_overwritten_while_it_is_read_is_nothing() -> None:
    segment = SharedSegment(PLAN)
    staging, window = StagingBuffers(PLAN, memory=segment), SegmentReader(segment.address, PLAN)
    staging.write(1, tensors(1))

    def overwrite(index: int) -> None:
        if index == 2:
            for version in (2, 3):
                staging.write(version, tensors(version))

    with pytest.raises(TransferFailed, match=r"^version 1 was overwritten while it was read$"):
        read(window, 1, done=overwrite)
    with pytest.raises(TransferFailed, match=r"^version 1 is no longer in the learner's memory$"):
        read(window, 1)
    assert read(window, 2)[1] == staging.digest(2)


def test_bytes_that_change_behind_the_words_show_in_the_digest() -> None:
    segment = SharedSegment(PLAN)
    staging, window = StagingBuffers(PLAN, memory=segment), SegmentReader(segment.address, PLAN)
    staging.write(1, tensors(1))
    digest = staging.digest(1)

    def tear(index: int) -> None:
        if index == 2:
            segment.buffer(0)[PLAN.buckets[4][0] + 4096] ^= 1

    assert read(window, 1)[1] == digest
    assert read(window, 1, done=tear)[1] != digest


def test_packing_that_fails_or_stands_still_ends_the_reading() -> None:
    segment = SharedSegment(PLAN)
    staging, window = StagingBuffers(PLAN, memory=segment), SegmentReader(segment.address, PLAN)
    staging._sides[0].open(7)
    staging._sides[0].reached(PLAN.buckets[2][1])
    with pytest.raises(
        TransferFailed,
        match=rf"^version 7 was packed up to byte {PLAN.buckets[2][1]}, then nothing came for 0\.05 s$",
    ):
        read(window, 7, timeout_s=0.05)
    with pytest.raises(TransferFailed, match="overwritten"):
        read(window, 7, done=lambda index: staging._sides[0].failed() if index == 2 else None)


def test_others_can_neither_write_nor_cut_it() -> None:
    segment = SharedSegment(PLAN)
    pid, file, name = segment.address.split("/")
    assert not any(name in entry for entry in os.listdir("/dev/shm"))
    # the same user may; the seals are what holds
    other = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
    try:
        for attempt in (
            lambda: os.pwrite(other, b"x", 4096),
            lambda: os.ftruncate(other, 0),
            lambda: mmap.mmap(other, 4096),
        ):
            with pytest.raises(PermissionError):
                attempt()
    finally:
        os.close(other)
    assert F_SEAL_FUTURE_WRITE == 0x10
    window = SegmentReader(segment.address, PLAN)
    with pytest.raises((ValueError, TypeError)):
        window._memory[0:1] = b"x"


def test_an_address_that_is_not_a_segment_of_this_plan_is_not_opened() -> None:
    segment = SharedSegment(PLAN)
    pid, file, name = segment.address.split("/")
    closed, gone = 900_000, 2**22 + 5  # no such file; above the kernel's largest process id
    for address, why in (
        ("nonsense", "not the address"),
        (f"{pid}/{file}/../{name}", "not the address"),
        (f"{pid}/{file}/rlearner-weights-{'0' * 16}", "another process has that id here"),
        (f"{pid}/0/{name}", "another process has that id here"),
    ):
        with pytest.raises(ValueError, match=why):
            SegmentReader(address, PLAN)
    with pytest.raises(FileNotFoundError):
        SegmentReader(f"{pid}/{closed}/{name}", PLAN)
    with pytest.raises(OSError, match=os.strerror(errno.ESRCH)):
        SegmentReader(f"{gone}/{file}/{name}", PLAN)
    with pytest.raises(ValueError, match=f"another one, of {size_of(PLAN)} bytes"):
        SegmentReader(segment.address, plan_of({"a": torch.zeros(10)}, 0.25))


async def test_a_receiver_keeps_one_window_and_says_once_why_it_has_none() -> None:
    first, second, neighbour = SharedSegment(PLAN), SharedSegment(PLAN), LocalLearner()
    window = neighbour.reach(first.address, PLAN)
    assert window is not None
    assert neighbour.reach(first.address, PLAN) is window
    other = neighbour.reach(second.address, PLAN)
    assert other is not None
    assert other.address == second.address
    assert neighbour.reach("1/2/elsewhere", PLAN) is neighbour.window is None
    assert neighbour.problem == "it is not the address of a segment"
    assert neighbour.reach(second.address, PLAN) is not None
    assert neighbour.problem == ""
    neighbour.leave()
    assert neighbour.window is None
    await asyncio.sleep(0)


class Slow(StoreMessages):
    """A member that reads one bucket each second and is done after ten, on a clock of its own."""

    def __init__(self, buckets: int) -> None:
        self.now, self.buckets = 0.0, buckets

    def heard(self, word: str) -> str | None:
        if word == "at/1":
            return str(min(int(self.now), self.buckets))
        return "" if word == "done/1" and self.now >= 10 else None

    def wait(self, word: str, timeout_s: float) -> str | None:
        self.now += timeout_s
        return self.heard(word)


def test_a_reader_is_waited_for_as_long_as_it_comes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    start = StartTransfer("1-1.0", 1, ("r1",), fresh=False, num_shared=1)
    for buckets in (10, 5):
        lines = Slow(buckets)
        monkeypatch.setattr(
            transfer, "time", SimpleNamespace(monotonic=lambda lines=lines: lines.now)
        )
        if buckets == 10:
            transfer.collect(lines, "done", start, 3.0)
            assert 10 <= lines.now <= 11
        else:
            with pytest.raises(transfer.SessionFailed, match=r"^r1: not done within 3 s$"):
                transfer.collect(lines, "done", start, 3.0)
            assert 8 <= lines.now <= 9
