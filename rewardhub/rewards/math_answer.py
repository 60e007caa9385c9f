"""Mathematical answers against a reference, by math-verify: equal numbers and expressions count, however they are written.

math-verify's own timeouts raise a signal, which works only in a main thread and not inside C code; here they are off, and the
worker process is killed instead.
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from broker.config import Section
from rewardhub.rewards.base import Sample

LONGEST_ANSWER: Final = 4000  # characters from the end that are looked at: an answer stands there, and parsing is not linear
BOXED: Final = "\\boxed"
_MARKDOWN: Final = re.compile(r"[*_`]{1,3}")
_GROUPED: Final = re.compile(r"(?<=\d),(?=\d{3}(\D|$))")


class MathAnswerArgs(Section):
    """Arguments of the reward ``math_answer``."""

    answer_after: str = "####"  # what follows the last occurrence is the answer, in reference and response; empty: nowhere
    correct: float = 1.0  # reward of an equal answer
    wrong: float = 0.0  # reward of any other, and of none


class MathAnswer:
    """``correct`` when the response's answer equals the reference, else ``wrong``.

    The response's answer is what follows the marker if there is one, else what math-verify finds: the last boxed expression,
    formula or number.
    """

    Args = MathAnswerArgs

    def __init__(self, args: MathAnswerArgs) -> None:
        import math_verify
        from math_verify import ExprExtractionConfig, LatexExtractionConfig

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
        self._args = args
        self._verifier: Any = math_verify
        self._last: tuple[str | None, list[Any]] = (None, [])
        self._targets = [LatexExtractionConfig(), ExprExtractionConfig()]

    def score(self, sample: Sample) -> float:
        """The reward of one response.

        Raises:
            ValueError: the reference holds no answer; that is a fault of the data, not of the policy.
        """
        gold = self._gold(sample.reference)
        found = self._parse(self._answer(sample.response[-LONGEST_ANSWER:]))
        equal = bool(found) and self._verifier.verify(gold, found, timeout_seconds=None)
        return self._args.correct if equal else self._args.wrong

    def _gold(self, reference: str) -> list[Any]:
        # The episodes of a group share their reference.
        if reference != self._last[0]:
            parsed = self._parse(self._answer(reference))
            if not parsed:
                raise ValueError(f"no mathematical answer in the reference {reference[-200:]!r}")
            self._last = (reference, parsed)
        return self._last[1]

    def _answer(self, text: str) -> str:
        marker = self._args.answer_after
        _, found, after = text.rpartition(marker) if marker else ("", "", text)
        if not found:
            return text[max(text.rfind(BOXED), 0) :]  # of several boxes the last is the answer
        # Behind a marker stands a bare number or formula; without dressing it parses as what it is.
        line = next((line for line in after.splitlines() if line.strip()), "")
        return _MARKDOWN.sub("", _GROUPED.sub("", line)).strip()

    def _parse(self, text: str) -> list[Any]:
        # Bare LaTeX without dollar signs is only found once it is put between them.
        parse = self._verifier.parse
        found: list[Any] = parse(text, extraction_config=self._targets, parsing_timeout=None)
        return found or (parse(f"${text}$", extraction_config=self._targets, parsing_timeout=None) if "\\" in text else [])
