"""What a transfer carries: whole buckets or changes, and when which; the store is torch's own, in
this process.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from broker.errors import TransferFailed
from broker.weights.bucket_payload import IncomingBuckets, OutgoingBuckets, ReferenceBytes
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of
from broker.weights.plan import LayoutPlan
from broker.weights.store_messages import StoreMessages

SHAPE = (5000,)
PLAN = plan_of({"w": torch.zeros(SHAPE)}, 4096 / 2**20)


def tensors(*changed: int) -> dict[str, torch.Tensor]:
    values = torch.arange(SHAPE[0], dtype=torch.float32)
    values[list(changed)] = -1.0
    return {"w": values}


def carry(
    staging: StagingBuffers,
    version: int,
    base: ReferenceBytes,
    held: FlatBuffer,
    held_digest: str,
    lines: StoreMessages,
) -> tuple[int, bool]:
    """One transfer without a wire: the bytes sent, and whether everything was."""
    whole = not base.fits([held_digest])
    base.begin()
    with staging.sending(version) as staged:
        outgoing, incoming = (
            OutgoingBuckets(staged, base, lines, whole=whole),
            IncomingBuckets(held, lines, whole=whole),
        )
        for index in range(len(outgoing)):
            sent, room = outgoing[index], incoming[index]
            assert sent is not None
            assert room is not None
            room.copy_(sent)
            outgoing.sent(index)
            incoming.arrived(index)
        assert staged.digest is not None
        base.end(staged.digest, whole=whole)
        assert held.digest() == staged.digest
    return outgoing.size_bytes, whole


def test_changes_only_while_the_receiver_holds_the_base_and_everything_now_and_then() -> None:
    staging, base, held, store = (
        StagingBuffers(PLAN),
        ReferenceBytes(PLAN, full_every=4),
        FlatBuffer(PLAN),
        HashStore(),
    )
    digest, sizes = "", []
    for version, changed in enumerate([(), (7,), (7, 4999), (8,), (9,), (10,)]):
        staging.write(version, tensors(*changed))
        staging.digest(version)
        sizes.append(
            carry(
                staging,
                version,
                base,
                held,
                digest,
                StoreMessages(store, f"s{version}", WaitMonitor()),
            )
        )
        digest = held.digest()
        assert torch.equal(held.tensors["w"], tensors(*changed)["w"])
    whole, num_buckets = PLAN.size_bytes, len(PLAN.buckets)
    assert num_buckets == 5
    # of each bucket a count and positions, together a multiple of 8 bytes, and the values: one
    # change or two take 4 or 8 more than none
    assert sizes == [
        (whole, True),
        (40 + 4, False),
        (40 + 4, False),
        (40 + 8 + 4, False),
        (whole, True),
        (40 + 8, False),
    ]


def test_another_digest_takes_everything() -> None:
    base = ReferenceBytes(PLAN, full_every=100)
    assert not base.fits([""])
    base.end("d1", whole=True)
    assert base.fits(["d1", "d1"])
    assert not base.fits(["d1", ""])
    assert not base.fits(["d1", "d2"])
    base.begin()  # a transfer that breaks off leaves nobody with known bytes
    assert not base.fits(["d1"])


def test_a_bucket_that_has_changed_all_over_goes_whole() -> None:
    staging, base, held, store = (
        StagingBuffers(PLAN),
        ReferenceBytes(PLAN, full_every=100),
        FlatBuffer(PLAN),
        HashStore(),
    )
    staging.write(0, tensors())
    staging.digest(0)
    carry(staging, 0, base, held, "", StoreMessages(store, "s0", WaitMonitor()))
    staging.write(1, tensors(*range(1024)))  # the first bucket
    digest = held.digest()
    staging.digest(1)
    sent, whole = carry(staging, 1, base, held, digest, StoreMessages(store, "s1", WaitMonitor()))
    assert not whole
    assert sent == 4096 + 4 * 8
    assert store.get("s1/size/0") == b"whole"


def test_the_next_bucket_is_there_once_it_is_packed() -> None:
    plan: LayoutPlan = plan_of({"a": torch.zeros(1024), "b": torch.zeros(1024)}, 4096 / 2**20)
    staging = StagingBuffers(plan)
    seen: list[list[bool]] = []

    class Slow(dict[str, torch.Tensor]):
        def get(self, name: str, default: object = None) -> torch.Tensor:
            with staging.sending(3) as staged:
                seen.append([staged[0] is not None, staged[1] is not None])
            return self[name]

    staging.write(3, Slow(a=torch.ones(1024), b=torch.ones(1024)))
    assert seen == [[False, False], [True, False]]
    with staging.sending(3) as staged:
        assert staged.digest is None
        assert staging.digest(3) == staged.digest == staged.flat.digest()


def test_a_version_that_cannot_be_packed_ends_whoever_sends_it() -> None:
    staging, sent = StagingBuffers(PLAN), []

    class Failing(dict[str, torch.Tensor]):
        def get(self, name: str, default: object = None) -> None:  # type: ignore[override]
            with staging.sending(1) as staged:
                sent.append(staged)

    with pytest.raises(TransferFailed, match="w is planned but missing"):
        staging.write(1, Failing())
    assert staging.digest(1) is None
    with pytest.raises(TransferFailed, match="could not be packed"):
        sent[0][0]


@pytest.mark.parametrize("size", ["", "0", "-4", "4096", "99999999999999999999", "x"])
def test_a_size_that_cannot_be_is_refused(size: str) -> None:
    store = HashStore()
    store.set("s/size/0", size or "ok")
    incoming = IncomingBuckets(
        FlatBuffer(PLAN), StoreMessages(store, "s", WaitMonitor()), whole=False
    )
    assert incoming[1] is None  # not announced yet
    with pytest.raises(
        TransferFailed, match="bucket 0 of 4096 bytes was announced with a difference of"
    ):
        incoming[0]
