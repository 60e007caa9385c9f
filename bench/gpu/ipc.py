"""Measure and check weight transfer between two processes on one GPU (CUDA IPC).

One process packs versions as a learner does, this one reads them as a server does, digest included.
ratio_to_copy is the speed against a copy of the same bytes within this process, ratio_to_local
against such a copy with the same digest. Checks: every bit that was read, complete and while it was
packed; a version overwritten during a read is refused; after the learner is killed by SIGKILL
during a read, the server's memory is unchanged, its GPU computes, the learner's memory is free, and
a second learner can be read. On a CPU the same code uses shared host memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from bench.gpu import common
from bench.gpu.weights import tensors_of
from broker.errors import TransferFailed, UserError
from broker.weights.digest import combine, digest_bucket
from broker.weights.group import WaitMonitor
from broker.weights.memory.cuda import CudaDevice
from broker.weights.memory.devices import SharedDevice
from broker.weights.memory.shared import SegmentReader, SharedSegment
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of

WAIT_S: Final = 120.0
LET_GO_S: Final = 20.0  # until the driver has taken back what a killed process had
SETTLED_S: Final = 1.0
SPARE_BYTES: Final = 64 << 20  # for kernels loaded between two readings
# of the learner's two buffers may still be missing then, for others use the GPU, too
LEFT_BEHIND: Final = 0.25


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument("--bucket-mib", type=float, default=None, help="(256, or 0.0625)")
    made.add_argument("--repeats", type=int, default=7)
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape = common.TINY if options.tiny else common.HALF_BILLION
    server = _Server(options, shape, options.bucket_mib or (0.0625 if options.tiny else 256.0))
    with server.learner() as learner:
        figures, checks = server.speeds(learner)
        checks["overwritten_is_refused"] = server.overwritten(learner)
        checks["killed_learner_leaves_what_is_held"] = server.killed(learner)
    server.close()
    free = server.settled_bytes()  # by now this process has loaded all that it needs
    with server.learner() as learner:
        checks["second_learner_is_read"] = server.reads(0, learner.asks("address"))
    server.close()
    checks["memory_of_the_killed_is_free"] = server.freed(free)
    return common.finish("ipc", device, shape, figures, checks)


class _Learner:
    """The other process, as this one speaks to it."""

    def __init__(self, process: Any, line: Connection) -> None:
        self.process = process
        self._line = line

    def asks(self, *words: Any) -> Any:
        self.says(*words)
        return self.hears()

    def says(self, *words: Any) -> None:
        self._line.send_bytes(json.dumps(words).encode())

    def hears(self) -> Any:
        if not self._line.poll(WAIT_S):
            raise UserError(f"the learner's process said nothing for {WAIT_S:g} s")
        try:
            return json.loads(self._line.recv_bytes())
        except EOFError:
            raise UserError("the learner's process ended; its own line above says why") from None


class _Server:
    """This process: a device, buffers on it, and a window on the learner's."""

    def __init__(
        self, options: argparse.Namespace, shape: common.ModelShape, bucket_mib: float
    ) -> None:
        self.options = options
        self.shape = shape
        self.bucket_mib = bucket_mib
        self.kind = options.device
        self.device = _device(self.kind)
        self.tensors = tensors_of(shape, self.kind)
        self.plan = plan_of(self.tensors, bucket_mib)
        self.flat = FlatBuffer(self.plan, self.kind)
        self.held = FlatBuffer(self.plan, self.kind)
        self.window: SegmentReader | None = None

    @contextmanager
    def learner(self) -> Iterator[_Learner]:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=_learn, args=(there, self.kind, self.shape, self.bucket_mib)
        )
        process.start()
        there.close()
        try:
            yield _Learner(process, here)
        finally:
            process.kill()
            process.join()

    def read(self, version: int, done: Callable[[int], None] = lambda index: None) -> str:
        """Read the version into ``flat`` and return its digest."""
        assert self.window is not None, "open it first"
        return combine(
            self.window.take(
                version,
                self.flat.bucket,
                WaitMonitor(),
                timeout_s=5.0,
                done=done,
                peek=lambda: None,
            )
        )

    def speeds(self, learner: _Learner) -> tuple[dict[str, Any], dict[str, bool]]:
        """Measure reads of a complete version and of one being packed, alternating with local
        copies.
        """
        exact = self.reads(0, learner.asks("address"))
        other = FlatBuffer(self.plan, self.kind)

        def local() -> None:
            for index in range(len(self.plan.buckets)):
                other.bucket(index).copy_(self.flat.bucket(index))
                digest_bucket(other.bucket(index))

        taken: dict[str, list[float]] = {"copy": [], "local": [], "ipc": []}
        for _ in range(self.options.repeats):
            copy = partial(other.buffer.copy_, self.flat.buffer)
            taken["copy"] += common.seconds(copy, self.kind, repeats=1, warm_up=1)
            taken["local"] += common.seconds(local, self.kind, repeats=1, warm_up=1)
            taken["ipc"] += common.seconds(lambda: self.read(0), self.kind, repeats=1, warm_up=1)
        learner.says("write", 1)
        learner.hears()  # its first byte is about to be copied
        began = time.perf_counter()
        followed = self.read(1)
        following_s = time.perf_counter() - began
        exact_following = followed == learner.hears() and self._holds(1)
        size = self.plan.size_bytes / 1e9
        rates = {"device_copy": "copy", "copy_and_digest": "local", "ipc": "ipc"}
        figures: dict[str, Any] = {
            "size_bytes": self.plan.size_bytes,
            "buckets": len(self.plan.buckets),
        }
        for name, kind in rates.items():
            figures[f"{name}_gbytes_per_s"] = round(size / statistics.median(taken[kind]), 3)
        figures["packed_and_read_gbytes_per_s"] = round(size / following_s, 3)
        for kind in ("copy", "local"):
            ratios = [a / b for a, b in zip(taken[kind], taken["ipc"], strict=True)]
            figures[f"ratio_to_{kind}"] = round(statistics.median(ratios), 3)
        return figures, {"read_bit_by_bit": exact, "read_bit_by_bit_while_packed": exact_following}

    def overwritten(self, learner: _Learner) -> bool:
        """Decide whether a version overwritten while it is read is refused and the newest is read."""

        def overwrite(index: int) -> None:
            if index == 0:
                for version in (2, 3):
                    learner.asks("write", version)
                    learner.hears()

        try:
            self.read(1, overwrite)
        except TransferFailed as error:
            return "overwritten while it was read" in str(error) and self.reads(3)
        return False

    def killed(self, learner: _Learner) -> bool:
        """Whether a learner that is killed while it is read leaves this process what it holds, and
        the GPU working.
        """
        self.held.buffer.copy_(self.flat.buffer)
        before = self.held.digest()

        def kill(index: int) -> None:
            if index == 0:
                os.kill(learner.process.pid, signal.SIGKILL)

        try:
            came = self.read(3, kill) == before  # it may have been fast enough
        except TransferFailed as error:
            came = "process has ended" in str(error)
        common.settle(self.kind)
        return came and self.held.digest() == before

    def reads(self, version: int, address: str | None = None) -> bool:
        """Decide whether a version read from ``address``, the memory of the learner, is exact bit
        by bit.
        """
        if address is not None:
            self.window = SegmentReader(address, self.plan, self.device)
        self.read(version)
        return self._holds(version)

    def _holds(self, version: int) -> bool:
        return all(
            torch.equal(self.flat.tensors[name], tensor + version)
            for name, tensor in self.tensors.items()
        )

    def close(self) -> None:
        if self.window is not None:
            self.window.close()
            self.window = None

    def free_bytes(self) -> int:
        """Return the free memory of the GPU, whichever process uses the rest."""
        return torch.cuda.mem_get_info()[0] if self.kind == "cuda" else 0

    def settled_bytes(self) -> int:
        """Return the free memory once it has not grown for a second: a killed process's is taken
        back late.
        """
        free = self.free_bytes()
        since = time.monotonic()
        while time.monotonic() - since < SETTLED_S and self.kind == "cuda":
            time.sleep(0.1)
            if (now := self.free_bytes()) > free + SPARE_BYTES:
                free = now
                since = time.monotonic()
        return max(free, self.free_bytes())

    def freed(self, before: int) -> bool:
        least = before - max(SPARE_BYTES, int(LEFT_BEHIND * 2 * self.plan.size_bytes))
        deadline = time.monotonic() + LET_GO_S
        while self.free_bytes() < least and time.monotonic() < deadline:
            torch.cuda.empty_cache()
            time.sleep(0.1)
        return self.free_bytes() >= least


def _device(kind: str) -> SharedDevice | None:
    return CudaDevice("cuda:0") if kind == "cuda" else None


def _learn(line: Connection, kind: str, shape: common.ModelShape, bucket_mib: float) -> None:
    """Run the learner: version N adds N to each element; answer a ``write`` at its start and with
    the digest.
    """
    tensors = tensors_of(shape, kind)
    plan = plan_of(tensors, bucket_mib)
    segment = SharedSegment(plan, _device(kind))
    staging = StagingBuffers(plan, memory=segment)
    staging.write(0, tensors)
    while True:
        word, *rest = json.loads(line.recv_bytes())
        if word == "address":
            line.send_bytes(json.dumps(segment.address).encode())
            continue
        version = int(rest[0])
        changed = {name: tensor + version for name, tensor in tensors.items()}
        staging.write(version, changed, lambda: line.send_bytes(b"true"))
        line.send_bytes(json.dumps(staging.digest(version)).encode())


if __name__ == "__main__":
    sys.exit(main())
