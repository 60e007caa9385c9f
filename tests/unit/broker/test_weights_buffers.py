"""Which buffer a version arrives in: never one that an engine computes from, and never one that a
broken transfer may write into.
"""

from __future__ import annotations

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from broker.weights.bucket_payload import IncomingBuckets, OutgoingBuckets, ReferenceBytes
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import StagingBuffers, plan_of
from broker.weights.receiver.buffers import IncomingVersion, ReceiveBuffers
from broker.weights.store_messages import StoreMessages

CPU = torch.device("cpu")
WEIGHTS = {"w": torch.arange(5000, dtype=torch.float32)}
PLAN = plan_of(WEIGHTS, 4096 / 2**20)


def taken(buffers: ReceiveBuffers) -> IncomingVersion:
    return buffers.take(PLAN, CPU)


def test_an_engine_that_copies_needs_one() -> None:
    buffers = ReceiveBuffers(kept=False)
    digest = buffers.hold(PLAN, WEIGHTS, CPU)
    first = taken(buffers)
    assert first.base is first.flat
    assert first.held == digest == first.flat.digest()
    buffers.arrived(first, "d1")
    buffers.load_failed()
    assert taken(buffers) == IncomingVersion(first.flat, first.flat, "d1")


def test_an_engine_that_keeps_what_it_is_given_has_two_that_take_turns() -> None:
    buffers = ReceiveBuffers(kept=True)
    digest = buffers.hold(PLAN, WEIGHTS, CPU)
    first = taken(buffers)  # the engine still computes from its own
    assert (first.base is first.flat, first.held) == (True, digest)
    buffers.arrived(first, "d1")
    second = taken(buffers)
    assert second.flat is not first.flat
    assert (second.base, second.held) == (first.flat, "d1")
    buffers.arrived(second, "d2")
    assert taken(buffers) == IncomingVersion(first.flat, second.flat, "d2")


def test_what_a_broken_transfer_may_write_into_is_not_used_again() -> None:
    buffers = ReceiveBuffers(kept=True)
    buffers.arrived(first := taken(buffers), "d1")
    broken = taken(buffers)
    again = taken(buffers)
    assert len({id(arrival.flat) for arrival in (first, broken, again)}) == 3
    # of the version that the engine computes from something is still known
    assert (again.base, again.held) == (first.flat, "d1")


def test_after_a_load_that_failed_neither_is_written_again() -> None:
    buffers = ReceiveBuffers(kept=True)
    buffers.arrived(first := taken(buffers), "d1")
    buffers.arrived(second := taken(buffers), "d2")
    buffers.load_failed()
    third = taken(buffers)
    assert third.flat not in (first.flat, second.flat)
    assert (third.base, third.held) == (third.flat, "")


def test_another_plan_takes_another_buffer() -> None:
    buffers, other = ReceiveBuffers(kept=False), plan_of({"a": torch.zeros(3)}, 1)
    buffers.hold(PLAN, WEIGHTS, CPU)
    arrival = buffers.take(other, CPU)
    assert (arrival.flat.plan, arrival.held) == (other, "")


def test_changes_of_a_version_that_is_in_use_arrive_in_the_other_buffer_and_leave_it_as_it_is() -> (
    None
):
    buffers, staging, base, store = (
        ReceiveBuffers(kept=True),
        StagingBuffers(PLAN),
        ReferenceBytes(PLAN, full_every=100),
        HashStore(),
    )
    seen: list[torch.Tensor] = []
    for version in range(4):
        values = WEIGHTS["w"].clone()
        values[: 3 * version] = -1.0
        staging.write(version, {"w": values})
        staging.digest(version)
        arrival, lines = taken(buffers), StoreMessages(store, f"s{version}", WaitMonitor())
        whole = not base.fits([arrival.held])
        assert whole == (version == 0)
        base.begin()
        with staging.sending(version) as staged:
            outgoing, incoming = (
                OutgoingBuckets(staged, base, lines, whole=whole),
                IncomingBuckets(arrival.flat, lines, whole=whole, base=arrival.base),
            )
            for index in range(len(outgoing)):
                sent, room = outgoing[index], incoming[index]
                assert sent is not None
                assert room is not None
                room.copy_(sent)
                outgoing.sent(index)
                incoming.arrived(index)
            assert staged.digest == arrival.flat.digest()
            base.end(staged.digest, whole=whole)
        if seen:
            assert torch.equal(arrival.base.tensors["w"], seen[-1])
        seen.append(values)
        buffers.arrived(arrival, arrival.flat.digest())
