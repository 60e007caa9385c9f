"""Measures how concurrent pieces of work slow each other down. Pure.

A piece advances by 1 / (base_s + each_s * running) units of work a second. How many pieces ran
changes while a piece runs, so the time of each piece is divided by that number, and one linear
equation per piece says how much work it did in these times. The curve is known once the load has
changed a little, as it does in every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

# Loads of 1, 2, 3-4, 5-8 … are told apart.
LEVELS: Final = 12
# Pieces after which an equation counts half.
HALF_LIFE: Final = 2000.0
MIN_PIECES: Final = 8  # before the curve counts as known
RATIOS: Final = (0.0, *np.logspace(-4, 3, 57).tolist())  # tried for each_s / base_s
# How much better a steeper curve must fit, per unit of slope.
CAUTION: Final = 1e-3


class Piece:
    """A piece of work; ``times``: at each load when it got a slot, None while it waits."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times: list[float] | None = None


class LoadCurve:
    """The curve of one process.

    Args:
        slots: how many pieces run at once at most. Others wait for the end of one, in the order in
            which they came.
    """

    def __init__(self, slots: Callable[[], int]) -> None:
        self._slots = slots
        self._running = 0
        self._at = 0.0
        self._waiting: deque[Piece] = deque()
        # Seconds at each load so far.
        self._times = [0.0] * LEVELS
        # the same times the number of pieces, for the mean load of a level
        self._load_s = [0.0] * LEVELS
        self._keep = 0.5 ** (1 / HALF_LIFE)
        self._products = np.zeros((LEVELS, LEVELS))
        self._work = np.zeros(LEVELS)
        self._fitted: tuple[float, float] | None = None
        self._pieces = 0

    def enter(self, now: float) -> Piece:
        """Begin a piece, or let it wait for a slot."""
        self._advance(now)
        piece = Piece()
        self._waiting.append(piece)
        self._start()
        return piece

    def leave(self, piece: Piece, now: float, units: float) -> None:
        """End a piece that did ``units`` of work; 0: it says nothing, for example as it failed."""
        self._advance(now)
        if piece.times is None:
            self._waiting.remove(piece)
            return
        self._running -= 1
        self._start()
        if units > 0:
            times = np.subtract(self._times, piece.times)
            self._products = self._products * self._keep + np.outer(times, times)
            self._work = self._work * self._keep + units * times
            self._fitted = None
            self._pieces += 1

    def fit(self) -> tuple[float, float]:
        """Return base_s and each_s, both at least 0; zeros before eight pieces have ended."""
        if self._fitted is None:
            self._fitted = self._solve()
        return self._fitted

    def _solve(self) -> tuple[float, float]:
        if self._pieces < MIN_PIECES:
            return 0.0, 0.0
        loads = np.array(
            [
                total / time if time else 1.0
                for total, time in zip(self._load_s, self._times, strict=True)
            ]
        )
        ratios = np.array(RATIOS)[:, None]
        # Speed at each load, up to a factor.
        shapes = 1 / (1 + ratios * loads)
        scales = (shapes @ self._work) / np.einsum("ri,ij,rj->r", shapes, self._products, shapes)
        # The squared work that it explains.
        fits = scales * (shapes @ self._work)
        best = int(np.argmax(fits / (1 + CAUTION * np.log1p(ratios[:, 0]))))
        base = 1 / float(scales[best])
        return base, base * RATIOS[best]

    def _start(self) -> None:
        while self._waiting and self._running < max(1, self._slots()):
            self._running += 1
            self._waiting.popleft().times = list(self._times)

    def _advance(self, now: float) -> None:
        elapsed = now - self._at
        running = self._running
        if running and elapsed > 0:
            level = min(LEVELS - 1, (running - 1).bit_length())
            self._times[level] += elapsed
            self._load_s[level] += elapsed * running
        self._at = now
