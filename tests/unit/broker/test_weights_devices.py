"""The learner's memory on a device: the card by which it is found, and what is read there is one
version or nothing.
"""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from memfd_device import UNITS, Memfd

from broker.errors import TransferFailed
from broker.weights.digest import combine
from broker.weights.group import WaitMonitor
from broker.weights.memory import shared
from broker.weights.memory.devices import MemoryCard
from broker.weights.memory.shared import LocalLearner, SegmentReader, SharedSegment
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of

PLAN = plan_of({"a": torch.zeros(700_000), "b": torch.zeros(300_001)}, 3.0)


def tensors(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {slot.spec.name: torch.rand(slot.spec.shape, generator=generator) for slot in PLAN.slots}


def read(window: SegmentReader, version: int) -> tuple[FlatBuffer, str]:
    flat = FlatBuffer(PLAN)
    digests = window.take(
        version,
        flat.bucket,
        WaitMonitor(),
        timeout_s=60.0,
        done=lambda index: None,
        peek=lambda: None,
    )
    return flat, combine(digests)


def lent() -> tuple[SharedSegment, StagingBuffers]:
    segment = SharedSegment(PLAN, Memfd())
    staging = StagingBuffers(PLAN, memory=segment)
    staging.write(1, tensors(1))
    return segment, staging


def test_a_card_comes_back_as_it_was_written() -> None:
    card = MemoryCard("cuda", bytes(range(16)), 2**34, bytes(range(64)))
    assert (
        card.text == f"cuda/000102030405060708090a0b0c0d0e0f/17179869184/{bytes(range(64)).hex()}"
    )
    assert MemoryCard.from_text(card.text) == card


UNIT = "0" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cuda",
        "cuda/00/1/00",
        f"cuda/{UNIT}/0/00",
        f"cuda/{UNIT}/-1/00",
        f"cuda/{UNIT}/1/0",
        f"../{UNIT}/1/00",
        f"c/{'g' * 32}/1/00",
    ],
)
def test_what_is_no_card_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a card of device memory$"):
        MemoryCard.from_text(text)


@pytest.mark.parametrize("piece", [1 << 16, 1 << 21, 1 << 30])
def test_versions_are_read_in_pieces_of_any_size(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "DEVICE_PIECE_BYTES", piece)
    segment, staging = lent()
    window = SegmentReader(segment.address, PLAN, Memfd(own=True))
    assert (window.on_device, segment.device) == (True, torch.device("cpu"))
    for version in (1, 2, 3):
        if version > 1:
            staging.write(version, tensors(version))
        flat, digest = read(window, version)
        assert digest == staging.digest(version)
        for name, tensor in tensors(version).items():
            assert torch.equal(flat.tensors[name], tensor)
    with pytest.raises(TransferFailed, match=r"^version 1 is no longer in the learner's memory$"):
        read(window, 1)
    window.close()
    with pytest.raises(TransferFailed, match="no longer"):
        read(window, 3)


async def test_who_cannot_open_it_is_told_why() -> None:
    segment, _ = lent()
    for device, why in (
        (None, "it lies in memfd memory, and weights arrive in host memory here"),
        (Memfd(visible=["right"]), f"unit {UNITS['left'].decode()} is hidden from this process"),
        (Memfd(), "a handle opens in another process"),
    ):
        neighbour = LocalLearner(device)
        assert neighbour.reach(segment.address, PLAN) is None
        assert neighbour.problem == why
    with pytest.raises(ValueError, match=f"another one, of {2 * (4_001_792)} bytes"):
        SegmentReader(segment.address, plan_of({"a": torch.zeros(10)}, 3.0), Memfd(own=True))


async def test_a_page_without_a_card_is_none_of_ours() -> None:
    segment, _ = lent()
    segment._memory[shared.CARD_AT : shared.CARD_AT + 4] = b"\xff///"
    neighbour = LocalLearner(Memfd(own=True))
    assert neighbour.reach(segment.address, PLAN) is None
    assert "is not a card of device memory" in neighbour.problem


def test_a_device_that_fails_and_a_learner_that_ends_are_said_in_one_line() -> None:
    class Broken(Memfd):
        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            raise RuntimeError(
                "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
            )

    segment, _ = lent()
    with pytest.raises(
        TransferFailed,
        match=r"^the learner's memory cannot be read: CUDA error: an illegal memory access was encountered$",
    ):
        read(SegmentReader(segment.address, PLAN, Broken(own=True)), 1)
    window = SegmentReader(segment.address, PLAN, Memfd(own=True))
    ended = subprocess.Popen(["true"])
    os.dup2(os.pidfd_open(ended.pid), window.process)
    ended.wait(60)
    with pytest.raises(TransferFailed, match=r"^the learner's process has ended$"):
        read(window, 1)
