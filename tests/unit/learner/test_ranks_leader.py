"""Rank 0's side of the ranks, without any."""

from __future__ import annotations

import subprocess
import time

import pytest

from learner.backends.ranks import leader as module
from learner.backends.ranks.leader import RankLeader


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


def test_ranks_that_do_not_leave_are_given_one_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.2)
    leader, ranks = RankLeader("nothing:Nothing", 1, {}), [Stubborn() for _ in range(4)]
    leader.processes = ranks  # type: ignore[assignment]
    leader.close()
    assert all(rank.killed for rank in ranks)
    assert sum(rank.patience[0] or 0.0 for rank in ranks) <= 0.2
