"""The ranks of one host, as rank 0 leaves them."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from learner.backends.ranks import children as module
from learner.backends.ranks.children import ChildRanks


class Stubborn:
    """A process that ends only when it is killed."""

    def __init__(self) -> None:
        self.patience: list[float | None] = []
        self.killed = False

    def wait(self, timeout: float | None = None) -> int:
        self.patience.append(timeout)
        if not self.killed:
            assert timeout is not None
            time.sleep(timeout)
            raise subprocess.TimeoutExpired("rank", timeout)
        return -9

    def kill(self) -> None:
        self.killed = True


def test_ranks_that_do_not_leave_are_given_one_time_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.2)
    children, ranks = ChildRanks(1), [Stubborn() for _ in range(4)]
    children.processes = ranks  # type: ignore[assignment]
    children.close()
    assert all(rank.killed for rank in ranks)
    assert sum(rank.patience[0] or 0.0 for rank in ranks) <= 0.2


def test_a_rank_that_cannot_be_spawned_leaves_no_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = socket.socketpair()
    monkeypatch.setattr(socket, "socketpair", lambda: pair)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    children = ChildRanks(1)
    with pytest.raises(FileNotFoundError):
        children._start(1)
    assert [one.fileno() for one in pair] == [-1, -1]
    children.close()
