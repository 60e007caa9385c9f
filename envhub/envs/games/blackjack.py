"""Blackjack of GymCards, which is gymnasium's, as text (Sutton and Barto, example 5.1).

Cards are drawn from an endless deck; J, Q and K count 10, an ace 11 if that does not exceed 21.
``hit`` takes a card, ``stand`` lets the dealer draw up to 17. The reward is 1 for a win, 0 for a
draw, -1 for a loss or more than 21; with ``natural`` a win with 21 in the first two cards gives
1.5. Text that is not an action only costs ``format_penalty``.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
from pydantic import NonNegativeFloat

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import one_of

ACTIONS: Final = {"HIT": "hit", "STAND": "stand", "STICK": "stand"}
RANKS: Final = ("A", "2", "3", "4", "5", "6", "7", "8", "9", "10", "J", "Q", "K")
HELD_OUT_SHARE: Final = 4  # one deal in this many is held out
NUM_EVAL: Final = 256
DEALER_STANDS: Final = 17


class BlackjackArgs(Section):
    """``env_args`` of ``blackjack``."""

    harmless = ("natural", "format_penalty", "answer_tag")

    natural: bool = False  # 1.5 for a win with 21 in the first two cards
    format_penalty: NonNegativeFloat = 0.0  # taken from the reward for text that is not an action
    # read the action from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False


def total(cards: list[int]) -> tuple[int, bool]:
    """Return (what the cards count, whether an ace counts 11). Cards are 1 to 13."""
    least = sum(min(card, 10) for card in cards)
    if 1 in cards and least + 10 <= 21:
        return least + 10, True
    return least, False


class Blackjack(Environment):
    """One deal at a time; the episodes of a group have the same cards."""

    Args = BlackjackArgs
    isolation = "none"

    args: BlackjackArgs

    def __init__(self, args: BlackjackArgs) -> None:
        super().__init__(args)
        self._rng = np.random.default_rng(0)
        self._own: list[int] = []
        self._dealer: list[int] = []

    @classmethod
    def num_tasks(cls, args: Any, split: Split) -> int | None:
        return NUM_EVAL if split == "eval" else None

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Deal; a hash of the visible cards assigns a deal to training or to evaluation."""
        self._rng = np.random.default_rng(
            [seed, task_index, 0] if split == "train" else [task_index % NUM_EVAL, 1]
        )
        # until the deal belongs to the split
        while True:
            self._dealer = [self._draw(), self._draw()]
            self._own = [self._draw(), self._draw()]
            if _is_held_out(self._own, self._dealer[0]) is (split == "eval"):
                return self._observe()

    def step(self, text: str) -> StepResult:
        action = one_of(text, ACTIONS, self.args.answer_tag)
        if action is None:
            return StepResult(self._observe(), -self.args.format_penalty, False, False)
        if action == "hit":
            self._own.append(self._draw())
            is_bust = total(self._own)[0] > 21
            return StepResult(self._observe(), -1.0 if is_bust else 0.0, is_bust)
        while total(self._dealer)[0] < DEALER_STANDS:
            self._dealer.append(self._draw())
        own = total(self._own)[0]
        dealer = total(self._dealer)[0]
        has_won = dealer > 21 or own > dealer
        reward = -1.0
        if has_won:
            is_natural = len(self._own) == 2 and own == 21
            reward = 1.5 if is_natural and self.args.natural else 1.0
        elif own == dealer:
            reward = 0.0
        return StepResult(self._observe(), reward, True, True, has_won)

    def text_frame(self) -> str:
        return f"{self._observe().text}\nDealer's hand: {_format_cards(self._dealer)}"

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Stand on hard 17, soft 18, and on hard 12 if the dealer shows 2 to 6."""
        if rng.random() < noise:
            return ("hit", "stand")[int(rng.integers(2))]
        count, is_soft = total(self._own)
        stand_at = 17
        if is_soft:
            stand_at = 18
        elif 2 <= self._dealer[0] <= 6:
            stand_at = 12
        return "stand" if count >= stand_at else "hit"

    def _draw(self) -> int:
        return int(self._rng.integers(1, 14))

    def _observe(self) -> Observation:
        count, is_soft = total(self._own)
        own = _format_cards(self._own)
        dealer = _format_cards(self._dealer[:1])
        text = f"Your hand: {own} ({'soft ' if is_soft else ''}{count})\nDealer shows: {dealer}"
        return Observation(text, anchor=text)


def _format_cards(cards: list[int]) -> str:
    return " ".join(RANKS[card - 1] for card in cards)


def _is_held_out(own: list[int], dealer: int) -> bool:
    cards = bytes([*sorted(own), dealer])
    return hashlib.blake2b(cards, digest_size=1).digest()[0] % HELD_OUT_SHARE == 0
