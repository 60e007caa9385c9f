"""A user books a table: the assistant asks for what it must know, then books.

The user is a seat of its own, played by a script (``shopper``), an endpoint or a policy. It alone
is told what it wants. The assistant ends the dialogue with ``BOOK people day hour``, for example
``BOOK 4 friday 19``; its reward is 1 if all three are right. A user who says ``BYE`` ends it too.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import numpy as np
from pydantic import Field

from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, Split, StepResult

SEATS: Final = ("user", "assistant")
DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
HOURS: Final = tuple(range(17, 23))
INSTRUCTION: Final = (
    "You call a restaurant and want a table. people: {people}. day: {day}. hour: {hour}. "
    "Answer only what the assistant asks, in one short sentence. Speak for yourself alone. "
    "Begin: say that you would like a table."
)
QUESTIONS: Final = {"people": "How many people?", "day": "Which day?", "hour": "At what hour?"}
OPENING: Final = "I would like a table."
_FACT: Final = re.compile(r"\b(people|day|hour): (\w+)")
_BOOK: Final = re.compile(r"BOOK (\d+) (\w+) (\d+)")


class BookingArgs(Section):
    """``env_args`` of ``booking``."""

    harmless = ("turn_penalty",)

    # of each turn of the assistant after the third question
    turn_penalty: Annotated[float, Field(ge=0)] = 0.0


class Booking(Environment):
    """One dialogue at a time; the user begins."""

    Args = BookingArgs
    isolation = "none"

    args: BookingArgs

    def __init__(self, args: BookingArgs) -> None:
        super().__init__(args)
        self._facts: dict[str, str] = {}
        self._seat = SEATS[0]
        self._num_turns = 0
        self._known: dict[str, str] = {}  # that the user has said, for demonstrations
        self._heard = ""

    @classmethod
    def seats(cls, args: Any) -> tuple[str, ...]:
        return SEATS

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Choose what the user wants."""
        rng = np.random.default_rng([seed, task_index, split == "eval"])
        self._facts = {
            "people": str(rng.integers(1, 9)),
            "day": DAYS[int(rng.integers(len(DAYS)))],
            "hour": str(HOURS[int(rng.integers(len(HOURS)))]),
        }
        self.reference = " ".join(self._facts.values())
        self.prompt = OPENING
        self._seat = SEATS[0]
        self._num_turns = 0
        self._known = {}
        self._heard = INSTRUCTION.format(**self._facts)
        return Observation(self._heard, seat=SEATS[0])

    def step(self, text: str) -> StepResult:
        seat = self._seat
        words = text.strip()
        self._heard = words
        self._seat = SEATS[1 - SEATS.index(seat)]
        if seat == SEATS[0]:
            self._note_facts(words)
            is_over = words.upper() == "BYE"
            return StepResult(self._observe(words), 0.0, done=is_over, valid=bool(words))
        self._num_turns += 1
        penalty = self.args.turn_penalty * (self._num_turns > len(QUESTIONS) + 1)
        booking = _BOOK.fullmatch(words)
        if booking is None:
            return StepResult(self._observe(words), -penalty, done=False, valid=bool(words))
        is_right = list(booking.groups()) == list(self._facts.values())
        return StepResult(
            Observation(words), float(is_right) - penalty, done=True, success=is_right
        )

    def text_frame(self) -> str:
        return f"{self._seat} hears: {self._heard}"

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str:
        if self._seat == SEATS[0]:
            return answer_question(self._heard, self._facts)
        missing = [fact for fact in QUESTIONS if fact not in self._known]
        if missing and rng.random() >= noise:
            return QUESTIONS[missing[0]]
        facts = [self._known.get(fact, guess) for fact, guess in self._guess(rng).items()]
        return f"BOOK {' '.join(facts)}"

    def _observe(self, words: str) -> Observation:
        return Observation(words, anchor=words, seat=self._seat)

    def _note_facts(self, words: str) -> None:
        for fact, value in self._facts.items():
            if re.search(rf"\b{value}\b", words) and fact in words:
                self._known[fact] = value

    def _guess(self, rng: np.random.Generator) -> dict[str, str]:
        return {
            "people": str(rng.integers(1, 9)),
            "day": DAYS[int(rng.integers(len(DAYS)))],
            "hour": str(HOURS[int(rng.integers(len(HOURS)))]),
        }


def read_facts(instruction: str) -> dict[str, str]:
    """Return what a user wants, as its first observation says; empty if it is another text."""
    return dict(_FACT.findall(instruction))


def answer_question(heard: str, facts: dict[str, str]) -> str:
    """Return what an honest user says: the facts that it is asked for, else what it wants."""
    asked = [fact for fact in facts if fact in heard.lower()]
    if read_facts(heard) or not asked:
        return OPENING
    return " ".join(f"The {fact} is {facts[fact]}." for fact in asked)
