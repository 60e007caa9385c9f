"""A link between nodes, used by the thread that waits and by one that reports a checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from learner.backends.ranks.link import LinkClosedError
from learner.nodes.encrypted_link import EncryptedFrames

FRAMES = 300


@pytest.fixture
def ends() -> Iterator[tuple[EncryptedFrames, EncryptedFrames]]:
    context = zmq.Context()
    one, other = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    one.bind("inproc://link")
    other.connect("inproc://link")
    yield EncryptedFrames(one), EncryptedFrames(other)
    one.close(0)
    other.close(0)
    context.term()


@pytest.mark.timeout(60)
def test_threads_put_while_another_takes(ends: tuple[EncryptedFrames, EncryptedFrames]) -> None:
    ours, theirs = ends
    answers: list[bytes] = []

    def put(name: str) -> None:
        for number in range(FRAMES):
            ours.put(f"{name}{number}".encode())

    def echo() -> None:
        for _ in range(2 * FRAMES):
            theirs.put(theirs.take())

    takes = threading.Thread(target=lambda: answers.extend(ours.take() for _ in range(2 * FRAMES)))
    threads = [
        takes,
        threading.Thread(target=echo),
        *(threading.Thread(target=put, args=(name,)) for name in "ab"),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "ab":  # in the order of each thread
        assert [one for one in answers if one.startswith(name.encode())] == [
            f"{name}{number}".encode() for number in range(FRAMES)
        ]


def test_frames_that_came_before_the_end_are_taken_first(
    ends: tuple[EncryptedFrames, EncryptedFrames],
) -> None:
    ours, theirs = ends
    theirs.put(b"last")
    ours.lost.set()
    assert ours.take() == b"last"
    with pytest.raises(LinkClosedError):
        ours.take()
    with pytest.raises(LinkClosedError):
        ours.put(b"nobody takes it")
