"""A game of several turns: guess a number and hear whether it is higher or lower."""

import random
import re

import numpy as np

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, StepResult


class Args(Section):
    """``domains.guess.env_args``: unknown keys and wrong types are refused before a start."""

    largest: int = 9


class Guess(Environment):
    """One game; the policy's messages are the guesses."""

    Args = Args

    def reset(self, task_index: int, split: str, seed: int) -> Observation:
        """Choose the number: the same for equal arguments. ``split`` is "train" or "eval"."""
        self.secret = random.Random(f"{split} {task_index}").randint(0, self.args.largest)
        # Bounds of the number, as the answers have shown so far.
        self.low = 0
        self.high = self.args.largest
        return Observation(f"A number from 0 to {self.args.largest}?")

    def step(self, text: str) -> StepResult:
        """Answer a guess. Other text is invalid, never an exception."""
        number = re.search(r"[0-9]{1,9}", text)
        if number is None:
            return StepResult(Observation("A number!"), reward=0.0, done=False, valid=False)
        guess = int(number[0])
        if guess == self.secret:
            return StepResult(Observation(""), reward=1.0, done=True, success=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return StepResult(Observation("Higher."), reward=0.0, done=False)
        self.high = min(self.high, guess - 1)
        return StepResult(Observation("Lower."), reward=0.0, done=False)

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        """Return a guess for the warm start: the middle, or by chance (``noise``) any number."""
        if rng.random() < noise:
            return str(rng.integers(self.args.largest + 1))
        return str((self.low + self.high) // 2)
