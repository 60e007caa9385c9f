"""Compares two answers by structure, and expressions by math-verify, in a bounded process.

math-verify's own timeouts are off: they raise in a signal handler, which its libraries swallow and
C code never sees. See ``rewardhub.bounded``.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Final, Literal

import msgspec

from rewardhub.bounded import TooCostly
from rewardhub.rewards import math_expression, math_extract, math_text
from rewardhub.rewards.math_cost import MAX_CHARS, is_costly_text
from rewardhub.rewards.math_equality import ComparisonOptions, NodeComparison
from rewardhub.rewards.math_extract import ExtractedAnswer
from rewardhub.rewards.math_read import Node, read

Verdict = Literal["equal", "different", "failed", "too_costly"]
# Pairs that use most of the parser and the comparison, so that forked processes inherit imports and
# filled caches.
WARM_UP: Final = (
    (r"$\frac{1}{2}$", "0.5"),
    (r"$(1,2]$", r"$(1,3]$"),
    (r"$(-\infty,1)\cup(2,\infty)$", r"$(-\infty,1)\cup[2,\infty)$"),
    (r"$\{1, x\}$", r"$\{y, 1\}$"),
    (r"$x^2 + 2x\sqrt{3} - \pi \cdot 10^{3}$", r"$x(x+2\sqrt{3}) - 1000\pi$"),
    (r"$\sin^2 x + \cos^2 x$", "$1$"),
    (r"$\log_2 8$", "$3$"),
    (r"$\int_0^1 x dx$", r"$\sum_{i=1}^{2} \frac{1}{i}$"),
    (r"$y=2x+3$", r"$3+2x=y+1$"),
    (r"$x=-1$", "$-1$"),
    (r"$1 < x < 2$", "$(1,2)$"),
    (r"$(1,2)$", "$1 < x < 2$"),
    (r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"$\begin{pmatrix}1\\\sqrt{3}\end{pmatrix}$"),
    (r"$50\%$", "$0.5$"),
    (r"$6 - 5i$", "$(2+i)^2$"),
    (r"$a_n = \sum_{k=0}^{n-1} F_k F_{n-k-1}$", r"$a_n = \sum_{k=0}^{n-1} F_{n-k-1} F_k$"),
    (r"$x^2/4 + y^2/3 = 1$", r"$|x|/2 + y^2/9 = 1/4$"),
)


class ComparisonRequest(msgspec.Struct, frozen=True):
    """Does ``answer`` equal ``gold``? Without ``answer``: is ``gold`` readable mathematics?"""

    gold: ExtractedAnswer
    answer: ExtractedAnswer | None
    options: ComparisonOptions


_REQUESTS: Final = msgspec.msgpack.Decoder(ComparisonRequest)


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Import and use math-verify once, so that forked processes start fast.

    Raises:
        ImportError: if math-verify is not installed.
    """
    import math_verify  # noqa: F401 - loads sympy and the parser

    # it warns that its timeouts are off
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    options = ComparisonOptions(6, 15, True, False)
    loose = msgspec.structs.replace(options, strict=False, allow_set_relation_comp=True)
    for gold, answer in WARM_UP:
        for warm_options in (options, loose) if "<" in gold + answer else (options,):
            NodeComparison(warm_options, gold).verdict(read(gold), read(answer))


def answer(data: bytes) -> bytes:
    """Return the verdict on a ``ComparisonRequest``; without answer, ``formula`` or ``text``.

    Raises:
        TooCostly: if an answer is too costly, before computing.
    """
    request = _REQUESTS.decode(data)
    try:
        gold = _read_gold(request.gold)
        comparison = NodeComparison(request.options, gold.text)
        if request.answer is None:
            return b"formula" if comparison.is_mathematics(gold) else b"text"
        return comparison.verdict(gold, node_of(request.answer)).encode()
    except (TooCostly, MemoryError, RecursionError):
        raise
    # sympy raises any exception, and an answer must never void its group.
    except Exception:  # noqa: BLE001
        return b"text" if request.answer is None else b"failed"


@lru_cache(maxsize=64)
def _read_gold(gold: ExtractedAnswer) -> Node:
    return node_of(gold, reference=True)


def node_of(answer: ExtractedAnswer, *, reference: bool = False) -> Node:
    """Return the structure of an answer; of prose, that of its last formula or number.

    Raises:
        TooCostly: if the answer is too long or too deeply nested.
    """
    if answer.bare:
        if len(answer.text) > MAX_CHARS or is_costly_text(answer.text):
            raise TooCostly("too large to parse")
        return _bare_node(answer.text, reference=reference)
    is_searched = (
        not reference
        or math_extract.is_prose(answer.text)
        or "$" in answer.text
        or "\\" in answer.text
    )
    if not is_searched or math_text.has_control_characters(answer.text):
        return Node("words", answer.text)
    formula = math_extract.last_formulas(answer.text)
    if formula is not None:
        return node_of(ExtractedAnswer(formula, bare=True), reference=reference)
    return math_expression.last_number(answer.text) or Node("words", answer.text)


def _bare_node(text: str, *, reference: bool) -> Node:
    """Return the structure of an answer; a sentence with one number is that number."""
    if math_text.has_control_characters(text):
        return Node("words", text)
    node = read(text)
    if node.kind != "expression" or math_text.is_formula(node.text):
        return node
    if reference and not math_extract.is_prose(text):
        return Node("words", text)
    return math_expression.only_number(text) or Node("words", text)
