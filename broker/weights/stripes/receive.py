"""Receives a version in stripes, one communicator and thread for each rank of the learner. It
blocks.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from broker.contract import wire
from broker.errors import TransferFailed, WireError
from broker.weights import plan as plans
from broker.weights.carriers import CARRIERS
from broker.weights.digest import combine, digest_bucket
from broker.weights.group import BucketSequence, Group, PeerLost, WaitMonitor
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import TransferSettings, parse_session
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.store_messages import StoreMessages
from broker.weights.stripes.layout import check_cover, placed_runs
from broker.weights.stripes.stripe import STRIPES_KEY, group_name

# buckets that a stripe may be ahead of the slowest, so that few tensors are incomplete
AHEAD: Final = 8


class Arrival(Protocol):
    """What arrives: the whole model in one buffer, or in passing."""

    @property
    def plan(self) -> LayoutPlan: ...

    @property
    def device(self) -> torch.device: ...

    def put(self, offset: int, part: Tensor, /) -> None:
        """Take a part of the model's flat buffer; called by several threads."""
        ...


class StripeGroups:
    """The communicators of a session, one for each stripe; see ``broker.weights.group.Group``."""

    def __init__(self, name: str, groups: list[Group]) -> None:
        self.name = name
        self.groups = groups
        self.lost: dict[str, str] = {}

    def broadcast(self, buckets: BucketSequence, watch: WaitMonitor, **_: object) -> None:
        raise TransferFailed(f"communicator {self.name} carries stripes")

    def close(self) -> threading.Thread:
        threads = [group.close() for group in self.groups]
        self.groups = []

        def join() -> None:
            for thread in threads:
                thread.join()

        closing = threading.Thread(target=join, name="weights-close", daemon=True)
        closing.start()
        return closing


def take_stripes(
    lines: StoreMessages,
    store: BoardClient,
    session: wire.WeightsSession,
    arrival: Arrival,
    communicator: Group | None,
    settings: TransferSettings,
    watch: WaitMonitor,
) -> tuple[StripeGroups, str]:
    """Receive all stripes at the same time; return the communicators, and which stripe's digest
    differs, if one does.

    Raises:
        TransferFailed: if a stripe failed, or the stripes are not the model; the communicators are
            closed.
    """
    stripes = _plans(store, arrival.plan)
    name = parse_session(session.session)[0]
    open_groups: list[Group] = []
    if isinstance(communicator, StripeGroups):
        open_groups = communicator.groups
        communicator.groups = []
    wrong: dict[int, str] = {}
    met: list[Group | None] = (
        [*open_groups] if len(open_groups) == len(stripes) else [None] * len(stripes)
    )
    pace = _Pace(stripes)
    stop = threading.Event()

    def peek() -> None:
        if stop.is_set():
            raise PeerLost("another stripe failed")
        if (reason := lines.heard("stop")) is not None:
            raise PeerLost(f"the learner stopped it: {reason}")

    def receive(number: int) -> None:
        try:
            group = met[number] or CARRIERS[session.carrier].open_group(
                store,
                group_name(name, number),
                rank=session.rank,
                size=session.world_size,
                settings=settings,
            )
            met[number] = group
            incoming = _IncomingStripe(number, stripes[number], arrival, pace)
            group.broadcast(incoming, watch, done=incoming.arrived, peek=peek)
            expected = lines.wait(f"stripe/{number}", session.timeout_s)
            if (received := combine(incoming.digests)) != expected:
                wrong[number] = f"digest of stripe {number}: received {received}, sent {expected}"
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(stripes), thread_name_prefix="weights-stripe") as pool:
        futures = [pool.submit(receive, number) for number in range(len(stripes))]
    groups = StripeGroups(name, [group for group in met if group is not None])
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        groups.close()
        raise next((error for error in errors if str(error) != "another stripe failed"), errors[0])
    return groups, next(iter(wrong.values()), "")


def _plans(store: BoardClient, model: LayoutPlan) -> list[LayoutPlan]:
    """Return the stripes' plans, which the learner keeps in the rendezvous.

    Raises:
        TransferFailed: if they do not hold the model exactly once.
    """
    with suppress(RuntimeError, msgspec.DecodeError):
        if (text := store.peek(STRIPES_KEY)) is not None:
            try:
                stripes = [
                    plans.from_text(entry) for entry in msgspec.json.decode(text, type=list[str])
                ]
                check_cover(model, stripes)
            except WireError as error:
                raise TransferFailed(str(error)) from None
            return stripes
    raise TransferFailed("the learner does not say how its ranks divide the model")


class _Pace:
    """Keeps stripes together: none asks for a bucket while it is far ahead of another."""

    def __init__(self, stripes: list[LayoutPlan]) -> None:
        self._sizes = [len(stripe.buckets) for stripe in stripes]
        self._arrived = [0] * len(stripes)

    def allows(self, number: int, bucket: int) -> bool:
        slowest = min(count / size for count, size in zip(self._arrived, self._sizes, strict=True))
        return (bucket - AHEAD) / self._sizes[number] <= slowest

    def arrived(self, number: int) -> None:
        self._arrived[number] += 1


class _IncomingStripe:
    """The buckets of one stripe; their bytes go where they belong as they come."""

    def __init__(self, number: int, plan: LayoutPlan, arrival: Arrival, pace: _Pace) -> None:
        self._number = number
        self._plan = plan
        self._arrival = arrival
        self._pace = pace
        runs = placed_runs(arrival.plan, plan)
        self._runs = {slot.spec.name: run for slot, run in zip(plan.slots, runs, strict=True)}
        self._buckets: dict[int, Tensor] = {}
        self.digests: list[bytes] = [b""] * len(plan.buckets)

    def __len__(self) -> int:
        return len(self._plan.buckets)

    def __getitem__(self, index: int) -> Tensor | None:
        if not self._pace.allows(self._number, index):
            return None
        start, stop = self._plan.buckets[index]
        bucket = self._buckets[index] = torch.empty(
            stop - start, dtype=torch.uint8, device=self._arrival.device
        )
        return bucket

    def arrived(self, index: int) -> None:
        bucket, (start, stop) = self._buckets.pop(index), self._plan.buckets[index]
        self.digests[index] = digest_bucket(bucket)  # which waits for a GPU
        for slot in self._plan.slots_between(start, stop):
            run = self._runs[slot.spec.name]
            first = max(run.start, start)
            last = min(run.stop, stop)
            self._arrival.put(run.offset + first - run.start, bucket[first - start : last - start])
        self._pace.arrived(self._number)
