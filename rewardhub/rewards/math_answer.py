"""Compares mathematical answers with a reference: equal numbers and expressions in any notation.

Plain numbers and equal texts are compared here, the rest by math-verify in a bounded process
(``cpu_s``).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, ClassVar, Final, Literal

import msgspec
from pydantic import Field, PositiveFloat

from broker.settings.config import Harmless, Section
from rewardhub.bounded import BoundedFunction, TooCostly
from rewardhub.rewards import math_compare, math_extract, math_text
from rewardhub.rewards.base import NoScore, ResponseFault, Sample, Scored
from rewardhub.rewards.math_compare import ComparisonRequest
from rewardhub.rewards.math_equality import ComparisonOptions
from rewardhub.rewards.math_extract import ExtractedAnswer
from rewardhub.rewards.thinking import Thinking

MEMORY_MIB: Final = 512  # of the bounded process
# Verdicts: the answers of a group are often the same.
REMEMBERED: Final = 1024

Kind = Literal["formula", "text"]


class MathAnswerArgs(Section):
    """Arguments of the reward ``math_answer``."""

    harmless: ClassVar[Harmless] = (
        "answer_after", "thinking", "correct", "wrong", "float_rounding", "numeric_precision",
        "strict", "allow_set_relation_comp", "cpu_s",
    )  # fmt: skip

    # marks the answer in reference and response, by its last occurrence; empty: no marker
    answer_after: str = "####"
    # keep: answers in <think> count; required: without </think> there is no answer
    thinking: Thinking = "drop"
    correct: float = 1.0  # reward of an equal answer
    wrong: float = 0.0  # reward of any other, or of no answer
    # decimals that must agree if one number has a decimal point
    float_rounding: Annotated[int, Field(ge=0, le=30)] = 6
    # significant digits of numeric comparisons of formulas
    numeric_precision: Annotated[int, Field(ge=1, le=100)] = 15
    strict: bool = True  # names of variables matter, and a set is not a tuple
    # an inequality in the response may equal an interval in the reference
    allow_set_relation_comp: bool = False
    # CPU seconds to parse and compare one answer; beyond, it is wrong, with a note
    cpu_s: PositiveFloat = 1.0


class MathAnswerReward:
    """Reward: ``correct`` if the response's answer equals the reference, else ``wrong``.

    ``rewardhub.rewards.math_extract.answer_of`` finds the answer. A reference that is not
    mathematics is compared as text, ignoring case, markup and punctuation; note ``by_text``. A too
    costly answer is wrong, note ``too_costly``, and so is one that sympy fails on, note
    ``not_comparable``.
    """

    Args = MathAnswerArgs

    def __init__(self, args: MathAnswerArgs) -> None:
        math_compare.warm_up()
        self._args = args
        self._options = ComparisonOptions(
            args.float_rounding,
            args.numeric_precision,
            args.strict,
            allow_set_relation_comp=args.allow_set_relation_comp,
        )
        self._bounded = BoundedFunction(
            math_compare.answer, cpu_s=args.cpu_s, memory_mib=MEMORY_MIB
        )
        self.kind = lru_cache(maxsize=REMEMBERED)(self._kind)
        self.verdict = lru_cache(maxsize=REMEMBERED)(self._compare)

    def score(self, sample: Sample) -> float | Scored:
        """Return the reward of one response.

        Raises:
            ResponseFault: if the answer is too costly to compare, or sympy raises.
            NoScore: if the reference is empty, a fault of the data.
        """
        gold = self.answer_of_reference(sample.reference)
        answer = math_extract.answer_of(
            sample.response, self._args.answer_after, self._args.thinking
        )
        if not gold.text.strip():
            raise NoScore(f"no answer in the reference {sample.reference[-200:]!r}")
        if self.kind(gold) == "text":
            equal = math_extract.is_same_text(gold, answer)
            return Scored(self._args.correct if equal else self._args.wrong, {"by_text": 1.0})
        verdict = self.verdict(gold, answer)
        if verdict in ("too_costly", "failed"):
            raise ResponseFault(
                "too_costly" if verdict == "too_costly" else "not_comparable", self._args.wrong
            )
        return self._args.correct if verdict == "equal" else self._args.wrong

    def answer_of_reference(self, reference: str) -> ExtractedAnswer:
        """Return the answer of a reference, whose thinking is never required."""
        thinking: Thinking = "keep" if self._args.thinking == "keep" else "drop"
        return math_extract.answer_of(reference, self._args.answer_after, thinking)

    def _kind(self, gold: ExtractedAnswer) -> Kind:
        """Return how a reference is compared: as text if it cannot be parsed in time."""
        if gold.bare and math_text.number(gold.text) is not None:
            return "formula"
        try:
            return "formula" if self._ask(gold, None) == b"formula" else "text"
        except TooCostly:
            return "text"

    def _compare(self, gold: ExtractedAnswer, answer: ExtractedAnswer) -> str:
        if gold.bare and answer.bare:
            exact = math_text.number(gold.text)
            answer_number = math_text.number(answer.text)
            if exact is not None and answer_number is not None:
                return (
                    "equal"
                    if math_text.same_number(exact, answer_number, self._args.float_rounding)
                    else "different"
                )
        if not answer.text.strip():
            return "different"
        if math_extract.is_same_writing(gold, answer):  # regardless of size
            return "equal"
        try:
            return self._ask(gold, answer).decode()
        except TooCostly:
            return "too_costly"

    def _ask(self, gold: ExtractedAnswer, answer: ExtractedAnswer | None) -> bytes:
        return self._bounded(msgspec.msgpack.encode(ComparisonRequest(gold, answer, self._options)))
