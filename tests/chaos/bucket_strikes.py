"""A backend and an engine as usual, in a process that dies in the middle of a transfer when a file
beside this one says so.

The plug-in points are what anybody's backend or engine has; nothing in the program knows of this.
The test copies the file into its own folder. The order is ``{"who": ID, "after": BUCKETS}``, taken
once. By shared memory the learner's buckets are those that are packed, a server's those that are
read.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import Tensor

from broker.weights.group import BucketSequence, WaitMonitor, WeightGroup
from broker.weights.memory.shared import SegmentReader
from broker.weights.memory.staging import StagedVersion
from learner.backends.torch import TorchBackend
from rollout.engines.hf.engine import HFEngine

ORDER = Path(__file__).with_name("order.json")
SHARED = Path(__file__).with_name("shared").exists()  # the weights go by shared memory
PLANNED = Path(__file__).with_name("buckets.txt")
ME = sys.argv[sys.argv.index("--id") + 1] if "--id" in sys.argv else "learner"

whole, read = WeightGroup.broadcast, SegmentReader.take
opened, reached = StagedVersion.open, StagedVersion.reached


def die() -> NoReturn:
    ORDER.unlink()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def plan(num_buckets: int) -> None:
    """Let the test know how many there are."""
    if not PLANNED.exists():
        written = PLANNED.with_name(f"buckets.{ME}")
        written.write_text(str(num_buckets))
        os.replace(written, PLANNED)  # whole, for it may be read at any moment


def fatal() -> int:
    """Behind how many buckets this process is to die; -1: it is not."""
    try:
        order = json.loads(ORDER.read_text())
    except FileNotFoundError:
        return -1
    return int(order["after"]) if order["who"] == ME else -1


def struck(done: Callable[[int], None]) -> Callable[[int], None]:
    """As it is, up to the bucket behind which the process is to die."""
    last, complete = fatal(), 0
    if last == 0:
        die()

    def counted(index: int) -> None:
        nonlocal complete
        done(index)
        complete += 1
        if complete == last:
            die()

    return counted


def broadcast(
    self: WeightGroup,
    buckets: BucketSequence,
    watch: WaitMonitor,
    *,
    done: Callable[[int], None],
    peek: Callable[[], None],
) -> None:
    plan(len(buckets))
    whole(self, buckets, watch, done=struck(done), peek=peek)


def take(
    self: SegmentReader,
    version: int,
    bucket: Callable[[int], Tensor],
    watch: WaitMonitor,
    *,
    timeout_s: float,
    done: Callable[[int], None],
    peek: Callable[[], None],
) -> list[bytes]:
    plan(len(self._plan.buckets))
    return read(self, version, bucket, watch, timeout_s=timeout_s, done=struck(done), peek=peek)


def begin(self: StagedVersion, version: int) -> None:
    opened(self, version)
    if SHARED and fatal() == 0:
        die()


def packed(self: StagedVersion, offset: int) -> None:
    reached(self, offset)
    if SHARED and 0 < fatal() <= sum(stop <= offset for _, stop in self.plan.buckets):
        die()


SegmentReader.take = take  # type: ignore[method-assign]
StagedVersion.open, StagedVersion.reached = begin, packed  # type: ignore[method-assign]
WeightGroup.broadcast = broadcast  # type: ignore[method-assign]


class Backend(TorchBackend):
    """The learner's."""


class Engine(HFEngine):
    """A rollout server's."""
