"""Compares two answers with math-verify, in a bounded process (see ``rewardhub.bounded``).

math-verify's own timeouts are off: they raise in a signal handler, which its libraries swallow and C code never sees.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from rewardhub.bounded import TooCostly
from rewardhub.rewards import math_text
from rewardhub.rewards.math_cost import MAX_CHARS, is_costly, is_costly_text
from rewardhub.rewards.math_text import ExtractedAnswer

Verdict = Literal["equal", "different", "too_costly"]
SMALL: Final = 1e-3
# Pairs that use most of the parser and the comparison, so that forked processes inherit imports and filled caches.
WARM_UP: Final = (
    (r"$\frac{1}{2}$", "0.5"),
    (r"$(1,2]$", r"$(1,3]$"),
    (r"$(-\infty,1)\cup(2,\infty)$", r"$(-\infty,1)\cup[2,\infty)$"),
    (r"$\{1, 2\}$", r"\boxed{2} and \boxed{1}"),
    (r"$x^2 + 2x\sqrt{3} - \pi \cdot 10^{3}$", r"$x(x+2\sqrt{3}) - 1000\pi$"),
    (r"$\sin^2 x + \cos^2 x$", "$1$"),
    (r"$\log_2 8$", "$3$"),
    (r"$\int_0^1 x dx$", r"$\sum_{i=1}^{2} \frac{1}{i}$"),
    (r"$y=2x+3$", r"$3+2x=y+1$"),
    (r"$x=-1$", "$-1$"),
    (r"$1 < x < 2$", "$(1,2)$"),
    (r"$(1,2)$", "$1 < x < 2$"),
    (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{pmatrix}1\\3\end{pmatrix}$"),
    (r"$50\%$", "$0.5$"),
)


class ComparisonOptions(msgspec.Struct, frozen=True):
    """Options of the comparison, by math-verify's names."""

    float_rounding: int
    numeric_precision: int
    strict: bool
    allow_set_relation_comp: bool


class ComparisonRequest(msgspec.Struct, frozen=True):
    """Request: does ``found`` equal ``gold``? Without ``found``: can ``gold`` be parsed as mathematics?"""

    gold: ExtractedAnswer
    found: ExtractedAnswer | None
    options: ComparisonOptions


_QUESTIONS: Final = msgspec.msgpack.Decoder(ComparisonRequest)


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Import and use math-verify once, so that forked processes start fast.

    Raises:
        ImportError: if math-verify is not installed.
    """
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its timeouts are off
    for one, other in WARM_UP:
        gold, found = (math_verify.parse(text, parsing_timeout=None) for text in (one, other))
        for loose in (False, True):
            math_verify.verify(gold, found, timeout_seconds=None, strict=not loose, allow_set_relation_comp=loose)


def answer(data: bytes) -> bytes:
    """Return the verdict on an encoded ``ComparisonRequest``; without ``found``, ``formula`` or ``text``.

    Raises:
        TooCostly: if an answer is found too costly before computing.
    """
    question = _QUESTIONS.decode(data)
    if question.found is None:
        return b"formula" if _expressions(_gold(question.gold)) else b"text"
    return _compare(_gold(question.gold), parse(question.found), question.options).encode()


@lru_cache(maxsize=64)
def _gold(gold: ExtractedAnswer) -> tuple[Any, ...]:
    return tuple(parse(gold, reference=True))


def parse(answer: ExtractedAnswer, *, reference: bool = False) -> list[Any]:
    """Return the sympy expressions in an answer, and the texts that they were parsed from.

    Raises:
        TooCostly: if the answer is too long or too deeply nested.
    """
    import math_verify
    from math_verify import ExprExtractionConfig, LatexExtractionConfig

    text = answer.text
    if answer.bare and (len(text) > MAX_CHARS or is_costly_text(text)):
        raise TooCostly("too large to parse")
    latex, expression = LatexExtractionConfig(), ExprExtractionConfig()

    def read(source: str, *targets: Any) -> list[Any]:
        found: list[Any] = math_verify.parse(source, extraction_config=targets, parsing_timeout=None)
        return [_complex(one) for one in found]

    if not answer.bare:
        searched = not reference or math_text.is_prose(text) or "$" in text or "\\" in text
        return read(math_text.imaginary(text), latex, expression) if searched else []
    if (plain := math_text.number(text)) is not None:
        return _number(*plain)
    if math_text.has_unit(text):
        return read(text, expression)
    if math_text.is_formula(text):
        delimited = "$" in text.replace("\\$", "") or "\\(" in text or "\\[" in text
        found = read(math_text.imaginary(text) if delimited else f"${math_text.to_latex(text)}$", latex)
        if _expressions(found):
            return found
        return read(text, latex, expression)
    return read(text, latex, expression) if not reference or math_text.is_prose(text) else []


def _number(value: Any, decimal: bool) -> list[Any]:
    import sympy

    exact = sympy.Rational(value.numerator, value.denominator)
    return [sympy.Float(exact, 30) if decimal else exact]


def _complex(found: Any) -> Any:
    """Replace the symbol ``i``, as math-verify leaves it, by the imaginary unit."""
    import sympy

    unit = sympy.Symbol("i", real=False)
    if not isinstance(found, sympy.Basic) or unit not in found.free_symbols or is_costly(found):
        return found
    return found.xreplace({unit: sympy.I})


def _expressions(found: Any) -> list[Any]:
    return [one for one in found if not isinstance(one, str)]


def _compare(gold: tuple[Any, ...], found: list[Any], options: ComparisonOptions) -> Verdict:
    import math_verify

    if any(one == other for one in gold for other in found):  # of the same shape, regardless of size
        return "equal"
    if any(is_costly(one) for one in _expressions(gold) + _expressions(found)):
        return "too_costly"
    settings = msgspec.structs.asdict(options)
    pairs = ((one, other) for one in gold for other in found if _near(one, other, options.float_rounding))
    equal = any(math_verify.verify(one, other, timeout_seconds=None, **settings) for one, other in pairs)
    return "equal" if equal else "different"


def _near(gold: Any, found: Any, digits: int) -> bool:
    """Return False for a small number and one that differs relatively; math-verify rounds small numbers to zero."""
    import sympy

    if not all(isinstance(one, sympy.Expr) and one.is_number for one in (gold, found)):
        return True
    one, other = gold.evalf(30), found.evalf(30)
    if not (one.is_Float or one.is_Rational) or not (other.is_Float or other.is_Rational) or abs(one) >= SMALL:
        return True
    return bool(abs(one - other) <= abs(one) * sympy.Rational(str(math_text.relative_tolerance(digits))))
