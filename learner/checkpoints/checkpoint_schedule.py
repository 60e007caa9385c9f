"""Decides when a checkpoint is due. Pure; it never affects what is trained."""

from __future__ import annotations


class CheckpointSchedule:
    """Due at multiples of ``every_steps``, and at the first step ``every_s`` after the newest one.

    A checkpoint that becomes due while another is being written stays due: it is taken at the first
    step that ends after that write, with the state of that step. So memory holds at most one copy
    of the state.

    Args:
        every_steps: 0 never.
        every_s: 0 never.
        now: seconds of any monotonic clock.
        ahead: how many may become due while writing fails before training waits.
    """

    def __init__(self, every_steps: int, every_s: float, now: float, ahead: int) -> None:
        self._every_steps = every_steps
        self._every_s = every_s
        self._ahead = ahead
        self._taken_at = self._due_at = now
        # Whether one should be taken.
        self.due = False
        # How many became due since writing began to fail.
        self.missed = 0

    def completed(self, step: int, now: float, *, failing: bool) -> None:
        """Count a completed step; ``failing`` if the previous checkpoint cannot be written."""
        by_step = self._every_steps > 0 and step % self._every_steps == 0
        by_clock = self._every_s > 0 and now - max(self._taken_at, self._due_at) >= self._every_s
        if not failing:
            self.missed = 0
        if by_step or by_clock:
            self.missed += int(failing)
            self.due = True
            self._due_at = now

    def press(self) -> None:
        """Make a checkpoint due now."""
        self.due = True

    def must_wait(self, *, failing: bool) -> bool:
        """Return whether training must wait because too many checkpoints could not be written."""
        return failing and self.missed >= self._ahead

    def taken(self, now: float) -> None:
        """Note that the state of this step was copied."""
        self.due = False
        self._taken_at = now
