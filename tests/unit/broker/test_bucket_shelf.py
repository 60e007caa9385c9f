"""What the receivers of an encrypted broadcast still lack, and which of them it goes on without."""

from __future__ import annotations

import threading

import pytest

from broker.weights.bucket_shelf import MAX_REQUESTS, PART_BYTES, BucketShelf
from broker.weights.rendezvous.board_request import BoardRequest


def made(*servers: str, buckets: int = 2) -> tuple[BucketShelf, threading.Condition]:
    changed = threading.Condition()
    return BucketShelf(servers, buckets, changed, 0.0, {}), changed


def fetch(shelf: BucketShelf, server: str, index: int, start: int, size: int) -> None:
    shelf.fetch(
        server,
        (server, index, start),
        BoardRequest("fetch", ["t"], number=index, start=start, size=size),
    )


def parts(
    shelf: BucketShelf, changed: threading.Condition, now: float = 0.0
) -> dict[object, bytes | None]:
    with changed:
        return dict(shelf.parts(now))


def test_parts_wait_for_their_bucket_and_a_bucket_for_all_receivers() -> None:
    shelf, changed = made("a", "b")
    fetch(shelf, "a", 0, 0, 4)
    assert parts(shelf, changed) == {}
    shelf.put(memoryview(b"01234567"), 0.0)
    assert parts(shelf, changed) == {("a", 0, 0): b"0123"}
    fetch(shelf, "a", 0, 4, 4)
    fetch(shelf, "b", 0, 0, 8)
    assert parts(shelf, changed)[("b", 0, 0)] == b"01234567"
    assert (shelf.complete(), shelf.complete()) == ([0], [])
    shelf.put(memoryview(b"89"), 0.0)
    fetch(shelf, "a", 1, 0, 2)
    parts(shelf, changed)
    assert not shelf.finished()
    shelf.lost["b"] = "it said so"
    assert shelf.finished()
    assert (shelf.complete(), shelf.live()) == ([1], ["a"])
    fetch_again = BoardRequest("fetch", ["t"], number=1, size=2)
    with pytest.raises(ValueError, match="not in this transfer any more"):
        shelf.fetch("b", 1, fetch_again)


def test_a_receiver_gets_each_byte_once_and_none_beyond() -> None:
    shelf, changed = made("a", buckets=1)
    shelf.put(memoryview(b"0123"), 0.0)
    fetch(shelf, "a", 0, 2, 4)
    assert parts(shelf, changed) == {("a", 0, 2): None}
    fetch(shelf, "a", 0, 0, 4)
    assert parts(shelf, changed) == {("a", 0, 0): b"0123"}
    fetch(shelf, "a", 0, 0, 4)
    assert parts(shelf, changed) == {("a", 0, 0): None}


@pytest.mark.parametrize(("index", "size"), [(2, 1), (-1, 1), (0, 0), (0, PART_BYTES + 1)])
def test_impossible_parts_are_refused(index: int, size: int) -> None:
    with pytest.raises(ValueError, match="no such part"):
        fetch(made("a")[0], "a", index, 0, size)


def test_requests_and_strangers_are_limited() -> None:
    shelf, _ = made("a")
    for start in range(MAX_REQUESTS):
        fetch(shelf, "a", 0, start, 1)
    with pytest.raises(ValueError, match="64 requests are not answered yet"):
        fetch(shelf, "a", 0, 99, 1)
    with pytest.raises(ValueError, match="not in this transfer"):
        fetch(shelf, "stranger", 0, 0, 1)


def test_who_fetches_nothing_or_is_much_slower_than_another_is_left_behind() -> None:
    shelf, changed = made("fast", "slow", "dead", buckets=1)
    shelf.put(memoryview(b"0123"), 0.0)
    fetch(shelf, "fast", 0, 0, 4)
    fetch(shelf, "slow", 0, 0, 1)
    parts(shelf, changed, 1.0)
    shelf.drop_late(2.0, 2.0)
    assert shelf.lost == {}
    shelf.drop_late(2.5, 2.0)
    assert shelf.lost == {"dead": "bucket 0 of 1 took longer than 2 s"}
    fetch(shelf, "slow", 0, 1, 1)
    parts(shelf, changed, 2.5)
    shelf.drop_late(3.5, 2.0)
    assert shelf.lost["slow"] == "took 3.5 s, another server 1.0 s"
    assert shelf.live() == ["fast"]
