"""Snapshots on disk and over HTTP: whole or refused in one line, whatever was done to them."""

from __future__ import annotations

import asyncio
import functools
import http.server
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from broker.contract import wire
from broker.errors import TransferFailed, UserError, WireError
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of
from broker.weights.probe import make_probe
from broker.weights.receiver.buffers import ReceiveBuffers
from broker.weights.snapshots import snapshot
from broker.weights.snapshots.publish import SnapshotPublisher
from broker.weights.snapshots.snapshot_poller import SnapshotPoller
from broker.weights.snapshots.snapshot_source import SnapshotSource

PLAN = plan_of({"a": torch.zeros(3000), "b": torch.zeros(2, 5, dtype=torch.bfloat16)}, 4096 / 2**20)


def tensors(version: int) -> dict[str, torch.Tensor]:
    return {
        "a": torch.arange(3000.0) + version,
        "b": torch.full((2, 5), version, dtype=torch.bfloat16),
    }


def flat(version: int) -> FlatBuffer:
    made = FlatBuffer(PLAN)
    made.fill(tensors(version))
    return made


def offer(version: int, epoch: int = 1) -> wire.WeightsOffer:
    return wire.WeightsOffer(
        epoch=epoch,
        version=version,
        digest=flat(version).digest(),
        plan=PLAN.digest,
        size_bytes=PLAN.size_bytes,
        carriers=["gloo"],
        probe=make_probe([1, 2], [-1.0], tolerance=0.1),
    )


def written(folder: Path, version: int, epoch: int = 1) -> bool:
    return snapshot.write(folder, "r", offer(version, epoch), PLAN, flat(version).buffer)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture(params=["folder", "http"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """``tmp_path`` as a server may name it: any web server will do."""
    if request.param == "folder":
        yield str(tmp_path)
        return
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


def test_what_is_read_is_what_was_written(place: str, tmp_path: Path) -> None:
    source = SnapshotSource(place)
    assert source.newest() is None
    assert written(tmp_path, 20)
    manifest = source.newest()
    assert manifest is not None
    assert (manifest.run, manifest.offer, manifest.plan, manifest.file) == (
        "r",
        offer(20),
        PLAN,
        "1-000020.weights",
    )
    made = FlatBuffer(PLAN)
    source.fill(manifest, made, WaitMonitor())
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in tensors(20).items())


def cut(path: Path) -> None:
    os.truncate(path, PLAN.size_bytes - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut, f"{PLAN.size_bytes - 1} bytes, its plan has {PLAN.size_bytes}; nothing was loaded"),
        (
            lengthen,
            f"{PLAN.size_bytes + 1} bytes, its plan has {PLAN.size_bytes}; nothing was loaded",
        ),
        (flip, "digest [0-9a-f]{32}, its offer says [0-9a-f]{32}; nothing was loaded"),
        (Path.unlink, "the file is gone"),
    ],
)
def test_other_bytes_are_refused(
    place: str, tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    written(tmp_path, 20)
    manifest = SnapshotSource(place).newest()
    assert manifest is not None
    spoil(tmp_path / manifest.file)
    with pytest.raises(TransferFailed, match=rf"^snapshot .*1-000020.weights: {why}$"):
        SnapshotSource(place).fill(manifest, FlatBuffer(PLAN), WaitMonitor())


def test_a_version_that_is_changed_in_the_manifest_is_noticed(place: str, tmp_path: Path) -> None:
    written(tmp_path, 20)
    path = tmp_path / "newest.json"
    body = json.loads(path.read_text())
    for spoiled in (
        json.dumps({**body, "version": 21}),
        path.read_text()[:-20],
        "[]",
        '{"format": 2}',
        json.dumps({**body, "offer": "AA=="}),
    ):
        path.write_text(spoiled)
        with pytest.raises(TransferFailed, match=r"^snapshot .*newest.json: [^\n]+$"):
            SnapshotSource(place).newest()


def test_a_manifest_whose_parts_do_not_belong_together_is_refused() -> None:
    other = plan_of({"a": torch.zeros(3)}, 1)
    with pytest.raises(WireError, match="does not match its offer"):
        snapshot.decode(snapshot.encode("r", offer(1), other))


def test_two_versions_stay_and_no_drafts(tmp_path: Path) -> None:
    (tmp_path / ".1-000001.weights.77").write_text("of a process that was killed")
    for version in (4, 8, 12, 16):
        assert written(tmp_path, version)
        os.utime(tmp_path / f"1-{version:06d}.weights", ns=(version, version))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "1-000012.weights",
        "1-000016.weights",
        "newest.json",
    ]


def test_a_newer_learners_snapshot_is_not_replaced(tmp_path: Path) -> None:
    assert written(tmp_path, 5, epoch=2)
    assert not written(tmp_path, 9, epoch=1)
    assert written(tmp_path, 4, epoch=3)  # resumed from before
    manifest = SnapshotSource(str(tmp_path)).newest()
    assert manifest is not None
    assert (manifest.offer.epoch, manifest.offer.version) == (3, 4)


async def test_a_snapshot_of_another_run_is_refused(tmp_path: Path) -> None:
    assert await SnapshotPoller(SnapshotSource(str(tmp_path)), "r").newest() is None
    written(tmp_path, 5)
    manifest = await SnapshotPoller(SnapshotSource(str(tmp_path)), "r").newest()
    assert manifest is not None
    arrival = ReceiveBuffers(kept=True).take(manifest.plan, torch.device("cpu"))
    await SnapshotPoller(SnapshotSource(str(tmp_path)), "r").read(manifest, arrival, WaitMonitor())
    assert torch.equal(arrival.flat.tensors["a"], tensors(5)["a"])
    with pytest.raises(TransferFailed, match=r"^snapshot /.*: expected run q, found run r$"):
        await SnapshotPoller(SnapshotSource(str(tmp_path)), "q").newest()


@pytest.mark.parametrize(
    "where", ["http://", "http://:80/x", "http://h:99999", "https://u:p@h/x", "http://h/x?y=1"]
)
def test_addresses_that_are_none(where: str) -> None:
    with pytest.raises(UserError, match="is not allowed; a folder, or http://host:port/path"):
        SnapshotSource(where)


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(
        TransferFailed, match=r"^snapshot http://127.0.0.1:9/newest.json: .*refused"
    ):
        SnapshotSource("http://127.0.0.1:9").newest()


async def test_every_so_many_versions_and_the_last_are_written(tmp_path: Path) -> None:
    staging, publisher = StagingBuffers(PLAN), SnapshotPublisher(tmp_path, "r", every=4)
    seen = []
    for version in range(1, 8):
        staging.write(version, tensors(version))
        staging.digest(version)
        publisher.offered(staging, offer(version))
        if publisher._task is not None:
            await publisher._task
        manifest = SnapshotSource(str(tmp_path)).newest()
        assert manifest is not None
        seen.append(manifest.offer.version)
    assert seen == [1, 1, 1, 4, 4, 4, 4]
    assert publisher.metrics()["weights/snapshot_version"] == 4
    await publisher.close()
    manifest = SnapshotSource(str(tmp_path)).newest()
    assert manifest is not None
    assert manifest.offer == offer(7)
    made = FlatBuffer(PLAN)
    SnapshotSource(str(tmp_path)).fill(manifest, made, WaitMonitor())
    assert torch.equal(made.tensors["a"], tensors(7)["a"])


async def test_a_version_that_was_overwritten_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    staging, publisher = StagingBuffers(PLAN), SnapshotPublisher(tmp_path, "r", every=100)
    for version in (1, 2, 3):
        staging.write(version, tensors(version))
    publisher.offered(staging, offer(1))  # its side holds version 3 by now
    assert publisher._task is not None
    await publisher._task
    assert SnapshotSource(str(tmp_path)).newest() is None
    publisher.offered(staging, offer(3))
    await publisher._task
    manifest = SnapshotSource(str(tmp_path)).newest()
    assert manifest is not None
    assert manifest.offer.version == 3


async def test_a_full_disk_is_said_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    staging, publisher = StagingBuffers(PLAN), SnapshotPublisher(tmp_path / "file", "r", every=100)
    staging.write(1, tensors(1))
    publisher.offered(staging, offer(1))
    await asyncio.wait_for(publisher.close(), 10)
    assert "version 1 could not be written as a snapshot" in caplog.text
