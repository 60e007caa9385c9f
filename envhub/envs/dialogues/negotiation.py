"""Two seats divide items that are worth something else to each of them (Lewis et al. 2017,
arXiv:1706.05125, the task).

A seat says ``OFFER 2 0 1``, the number of each item that it wants itself, ``ACCEPT`` the other's
last offer, or anything else, which is talk. The reward of an agreement is the share of the value of
all items that a seat gets, 0 to 1; without an agreement both get 0.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field, PositiveInt

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult

SEATS: Final = ("A", "B")
ITEMS: Final = ("books", "hats", "balls")
_OFFER: Final = re.compile(r"OFFER (\d+) (\d+) (\d+)")


class NegotiationArgs(Section):
    """``env_args`` of ``negotiation``."""

    harmless = ("rounds", "success_share")

    rounds: PositiveInt = 5  # turns of each seat, after which there is no agreement
    # least share of the value that counts as a success
    success_share: Annotated[float, Field(gt=0, le=1)] = 0.5


class Negotiation(Environment):
    """One negotiation at a time; A begins."""

    Args = NegotiationArgs
    isolation = "none"

    args: NegotiationArgs

    def __init__(self, args: NegotiationArgs) -> None:
        super().__init__(args)
        self._counts: list[int] = []
        self._values: dict[str, list[int]] = {}
        self._offer: list[int] = []  # what the seat that made it wants
        self._num_turns = 0

    @classmethod
    def seats(cls, args: Any) -> tuple[str, ...]:
        return SEATS

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Deal the items and their values."""
        rng = np.random.default_rng([seed, task_index, split == "eval"])
        self._counts = rng.integers(1, 4, len(ITEMS)).tolist()
        # every item is worth something, so that there is always something to divide
        self._values = {seat: rng.integers(1, 6, len(ITEMS)).tolist() for seat in SEATS}
        self._offer = []
        self._num_turns = 0
        return self._observe("")

    def step(self, text: str) -> StepResult:
        words = text.strip()
        self._num_turns += 1
        is_valid = True
        if words == "ACCEPT" and self._offer:
            return self._agree()
        if (match := _OFFER.fullmatch(words)) is not None:
            offer = [int(count) for count in match.groups()]
            is_valid = all(count <= most for count, most in zip(offer, self._counts, strict=True))
            self._offer = offer if is_valid else self._offer
        elif words.startswith(("OFFER", "ACCEPT")) or not words:
            is_valid = False
        if self._num_turns >= self.args.rounds * len(SEATS):
            return StepResult(Observation("no agreement"), 0.0, done=True, valid=is_valid)
        return StepResult(self._observe(words), 0.0, done=False, valid=is_valid)

    def text_frame(self) -> str:
        return f"{self._describe(self._counts)}; offer {self._offer or 'none'}"

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        seat = self._acting
        if self._offer and (self._share(seat, self._rest()) >= 0.5 or rng.random() < noise):
            return "ACCEPT"
        if rng.random() < noise:
            offer = [int(rng.integers(count + 1)) for count in self._counts]
        else:
            # what is worth more than its mean: the other may value the rest
            values = self._values[seat]
            mean = sum(values) / len(values)
            offer = [
                count if value >= mean else 0
                for count, value in zip(self._counts, values, strict=True)
            ]
        return f"OFFER {' '.join(map(str, offer))}"

    @property
    def _acting(self) -> str:
        return SEATS[self._num_turns % len(SEATS)]

    def _agree(self) -> StepResult:
        """End with the offer of the seat that acted before."""
        taker = SEATS[(self._num_turns - 1) % len(SEATS)]
        giver = SEATS[self._num_turns % len(SEATS)]
        shares = {
            giver: self._share(giver, self._offer),
            taker: self._share(taker, self._rest()),
        }
        successes = tuple(seat for seat in SEATS if shares[seat] >= self.args.success_share)
        return StepResult(
            Observation("agreed"), 0.0, done=True, seat_rewards=shares, seat_successes=successes
        )

    def _rest(self) -> list[int]:
        return [most - count for most, count in zip(self._counts, self._offer, strict=True)]

    def _share(self, seat: str, counts: list[int]) -> float:
        values = self._values[seat]
        whole = sum(count * value for count, value in zip(self._counts, values, strict=True))
        return sum(count * value for count, value in zip(counts, values, strict=True)) / whole

    def _observe(self, words: str) -> Observation:
        seat = self._acting
        lines = [words] if words else []
        if self._num_turns < len(SEATS):
            values = ", ".join(map(str, self._values[seat]))
            lines.append(f"You are {seat}. {self._describe(self._counts)}, worth {values} each.")
        text = "\n".join(lines)
        return Observation(text, anchor=text, seat=seat)

    @staticmethod
    def _describe(counts: list[int]) -> str:
        return ", ".join(f"{count} {item}" for count, item in zip(counts, ITEMS, strict=True))
