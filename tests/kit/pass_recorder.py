"""A recorder of passes that does the work again instead of replaying a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch


class PassRecorderDouble:
    """Counts what is recorded, replayed and dropped.

    Attributes:
        room: what ``has_room`` returns.
        problem: why recording fails; empty: it does not.
        is_stuck: replays do nothing.
    """

    def __init__(self) -> None:
        self.records = 0
        self.replays = 0
        self.drops = 0
        self.room = True
        self.problem = ""
        self.is_stuck = False

    def has_room(self) -> bool:
        return self.room

    def check(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        if self.problem:
            raise RuntimeError(self.problem)
        self.records += 1

        def replay() -> None:
            self.replays += 1
            if not self.is_stuck:
                work()

        return replay

    def drop(self) -> None:
        self.drops += 1


def record_passes(monkeypatch: pytest.MonkeyPatch) -> PassRecorderDouble:
    """Let models of engine hf record their passes with the double that this returns."""
    recorder = PassRecorderDouble()

    def make(_: torch.device) -> PassRecorderDouble:
        return recorder

    monkeypatch.setattr("rollout.engines.hf.model.make_recorder", make)
    return recorder
