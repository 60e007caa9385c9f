"""The sender's two buffers: the version being sent never changes, and writing never waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from broker.errors import TransferFailed
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of
from broker.weights.rounding import round_into

SHAPE = (300_000,)


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full(SHAPE, float(version))}


PLAN = plan_of(tensors(0), 0.25)


def digest_of(version: int) -> str:
    flat = FlatBuffer(PLAN)
    flat.fill(tensors(version))
    return flat.digest()


def test_newest_stays_while_the_next_is_written() -> None:
    staging = StagingBuffers(PLAN)
    staging.write(1, tensors(1))
    staging.write(2, tensors(2))
    assert staging.digest(1) == digest_of(1)
    assert staging.digest(2) == digest_of(2)
    staging.write(3, tensors(3))
    assert staging.digest(1) is None
    assert staging.digest(2) == digest_of(2)


def test_version_being_sent_is_never_overwritten() -> None:
    staging = StagingBuffers(PLAN)
    staging.write(1, tensors(1))
    with staging.sending(1) as staged:
        for version in range(2, 6):
            staging.write(version, tensors(version))
            assert staged.flat.tensors["w"].unique().tolist() == [1.0]
            assert staging.digest(version) == digest_of(version)
        assert staging.digest(4) is None
    with staging.sending(5) as staged:
        assert staged.flat.tensors["w"].unique().tolist() == [5.0]
    with pytest.raises(TransferFailed, match="version 4 was superseded"), staging.sending(4):
        pass


def test_digest_never_mixes_versions() -> None:
    """A version digested while another is written over it is None or right."""
    staging, seen, done = (
        StagingBuffers(PLAN),
        {version: digest_of(version) for version in range(60)},
        threading.Event(),
    )
    staging.write(0, tensors(0))
    wrong: list[int] = []

    def digest() -> None:
        while not done.is_set():
            for version in list(seen):
                if staging.digest(version) not in (None, seen[version]):
                    wrong.append(version)

    thread = threading.Thread(target=digest)
    thread.start()
    for version in range(1, 60):
        staging.write(version, tensors(version))
    done.set()
    thread.join()
    assert wrong == []


def test_missing_and_misshapen_tensors() -> None:
    staging = StagingBuffers(PLAN)
    with pytest.raises(TransferFailed, match="w is planned but missing"):
        staging.write(1, {"v": torch.zeros(SHAPE)})
    with pytest.raises(TransferFailed, match=r"w: expected shape \[300000\], got \[2\]"):
        staging.write(1, {"w": torch.zeros(2)})
    assert staging.digest(1) is None


def test_cast_on_the_way_in() -> None:
    source = {"w": torch.rand(1000)}
    flat = FlatBuffer(plan_of(source, 1, dtype="bfloat16"))
    flat.fill(source)
    wanted = torch.empty(1000, dtype=torch.bfloat16)
    round_into(wanted, source["w"])
    assert torch.equal(flat.tensors["w"], wanted)


def test_the_digest_that_follows_the_copy_is_that_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("broker.weights.memory.staging.PIECE_BYTES", 1000)
    tensors = {name: torch.randn(size) for name, size in (("a", 3001), ("b", 5), ("c", 9000))}
    staging = StagingBuffers(plan_of(tensors, 3 * 4096 / 2**20))
    expected = FlatBuffer(staging.plan)
    with ThreadPoolExecutor(1) as pool:
        for version in range(4):
            tensors["c"][version] = 7.0
            followed: list[Future[str | None]] = []
            staging.write(
                version,
                tensors,
                lambda version=version, to=followed: to.append(
                    pool.submit(staging.digest, version)
                ),
            )
            expected.fill(tensors)
            assert followed[0].result(10) == staging.digest(version) == expected.digest()
            assert staging.digest(version - 2) is None
