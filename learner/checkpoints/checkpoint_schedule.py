"""When a checkpoint is due. Pure; it decides only when one is written, never what is trained."""

from __future__ import annotations


class Due:
    """Due at steps that ``every_steps`` divides, and at the first step that ends ``every_s`` after the newest one was taken.

    A checkpoint that falls due while another is being written stays due: it is taken at the first step that ends after that write,
    with the state of that step. So at most one copy of the state is held in memory.

    Args:
        every_steps: 0 never.
        every_s: 0 never.
        now: seconds on any clock that does not go back.
        ahead: how many may fall due while writing fails before training waits for it.

    Attributes:
        due: one should be taken.
        missed: how many fell due since writing began to fail.
    """

    def __init__(self, every_steps: int, every_s: float, now: float, ahead: int) -> None:
        self._every_steps, self._every_s, self._ahead = every_steps, every_s, ahead
        self._taken_at = self._due_at = now
        self.due = False
        self.missed = 0

    def completed(self, step: int, now: float, *, failing: bool) -> None:
        """A step was completed, while writing the one before fails or not."""
        by_step = self._every_steps > 0 and step % self._every_steps == 0
        by_clock = self._every_s > 0 and now - max(self._taken_at, self._due_at) >= self._every_s
        self.missed = self.missed + int(by_step or by_clock) if failing else 0
        if by_step or by_clock:
            self.due, self._due_at = True, now

    def press(self) -> None:
        """One is needed although no schedule asks for it."""
        self.due = True

    def must_wait(self, *, failing: bool) -> bool:
        """Whether training has run on as far as it may while nothing can be written."""
        return failing and self.missed >= self._ahead

    def taken(self, now: float) -> None:
        """The state of this step was copied."""
        self.due, self._taken_at = False, now
