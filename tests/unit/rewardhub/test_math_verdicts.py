"""Verdicts of the math reward on structures, notations, thinking and prose; no answer voids its
group.
"""

from __future__ import annotations

from typing import Any

import pytest

from rewardhub.rewards import loading, math_expression
from rewardhub.rewards.base import ResponseFault, Sample, Scored, score_of_fault

MATRIX = r"\begin{pmatrix} 0 & 3 \\ 0 & -1 \end{pmatrix}"


def sample(response: str, reference: str) -> Sample:
    return Sample(
        domain="math", task_index=0, prompt="", response=response, reference=reference, reward=0.0, reward_parts={},
        success=False, end="terminated", num_turns=1, num_tokens=5, metrics={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def score() -> Any:
    """The reward with default arguments; its process is used again."""
    return loading.load("math_answer", {})


def value_of(score: Any, response: str, reference: str) -> float:
    try:
        scored = score(sample(response, reference))
    except ResponseFault as fault:
        scored = score_of_fault(fault, num_turns=1)
    return float(scored.value) if isinstance(scored, Scored) else float(scored)


@pytest.mark.parametrize(
    "formula",
    [
        *(r"1 \le i \le 5", "i<2", "(1,i)", "[i,1]", r"\max(i,j)", r"\sum_{n=1}^{\infty} 1"),
        *(
            r"\lfloor \frac{1}{0} \rfloor",
            r"\log_1 2",
            r"x \equiv 1 \pmod 0",
            r"\begin{pmatrix}1&2\\3\end{pmatrix}",
        ),
        *(r"\begin{pmatrix}0&0\\0&0\end{pmatrix}^{-1}", r"\int_0^{\infty} x dx", r"\sqrt[0]{2}"),
    ],
)
def test_a_formula_on_which_sympy_raises_is_wrong_against_numbers_and_like_itself(
    score: Any, formula: str
) -> None:
    assert value_of(score, rf"\boxed{{{formula}}}", "42") == 0.0
    assert value_of(score, rf"\boxed{{{formula}}}", rf"\boxed{{{formula}}}") == 1.0


def test_an_exception_of_a_library_is_a_fault_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_args: object) -> bool:
        raise ArithmeticError("no value")

    monkeypatch.setattr(math_expression, "is_near", fail)
    score: Any = loading.load("math_answer", {"wrong": -1.0})
    with pytest.raises(ResponseFault, match="not_comparable") as caught:
        score(sample(r"\boxed{x+1}", "x+2"))
    assert caught.value.value == -1.0
    assert score(sample(r"\boxed{x+1}", "x + 1")) == 1.0  # written alike, so nothing is computed


def test_an_exception_outside_the_comparison_of_expressions_is_one_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_text: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(math_expression, "last_number", fail)
    score: Any = loading.load("math_answer", {})
    with pytest.raises(ResponseFault, match="not_comparable"):
        score(sample("I think that it may be 43 or so", "42"))


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        (MATRIX, r"\boxed{\begin{bmatrix}0&3\\0&-1\end{bmatrix}}", r"\boxed{-1}"),
        (f"${MATRIX}$", rf"\boxed{{{MATRIX}}}", r"\boxed{\begin{pmatrix}0&3\\0&-2\end{pmatrix}}"),
        (r"\begin{pmatrix}\frac{1}{2}\\1\end{pmatrix}", r"\boxed{(0.5, 1)}", r"\boxed{(1, 0.5)}"),
        ("204_5", r"\boxed{204_{5}}", r"\boxed{204_6}"),
        ("204_5", r"\boxed{54}", r"\boxed{204}"),
        ("6:00", r"\boxed{6:00\text{ PM}}", r"\boxed{9:00}"),
        (r"\frac{1}{0}", r"\boxed{\frac{1}{0}}", r"\boxed{\frac{2}{0}}"),
        (r"0.\overline{3}", r"\boxed{\frac{1}{3}}", r"\boxed{0.\overline{4}}"),
        (r"1", r"\boxed{0.\overline{9}}", r"\boxed{0.\overline{8}}"),
        (r"n \equiv 1 \pmod 3", r"\boxed{n \equiv 4 \pmod{3}}", r"\boxed{n \equiv 2 \pmod 3}"),
        (r"\{x \mid x > 2\}", r"\boxed{\{t : 2 < t\}}", r"\boxed{\{x \mid x > 3\}}"),
        (r"\text{even}", r"\boxed{even}", r"\boxed{odd}"),
        ("C", "Answer: C", "Answer: D"),
        ("+7", "Therefore the answer is +7", "Therefore the answer is -7"),
        ("42", "<answer>42</answer>", "<answer>43</answer>"),
        ("x!", r"\boxed{x!}", r"\boxed{x}"),
        ("7/2", "3 1/2", "3"),
        ("1234567", "\\boxed{1\u2009234\u2009567}", r"\boxed{567}"),
        ("90", "[90]", "[60]"),
        (r"1 < x \le 2", r"\boxed{2 \ge x > 1}", r"\boxed{2 > x \ge 1}"),
        ("(i, -i)", r"\boxed{(i,-i)}", r"\boxed{(-i,i)}"),
        ("3+4i", r"\boxed{(2+i)^2}", r"\boxed{3}"),
        (r"5\text{ cm}", r"\boxed{5}", r"\boxed{5\text{ m}}"),
        ("3t", r"\boxed{3t}", r"\boxed{3}"),
        ("$x^2/4 + y^2/3 = 1$", r"\boxed{3x^2 + 4y^2 = 12}", r"\boxed{3x^2 + 4y^2 = 11}"),
    ],
)
def test_a_structure_is_never_read_as_its_last_number(
    score: Any, reference: str, right: str, wrong: str
) -> None:
    assert value_of(score, right, reference) == 1.0
    assert value_of(score, wrong, reference) == 0.0


@pytest.mark.parametrize(
    ("thinking", "response", "expected"),
    [
        ("drop", r"<think>\boxed{42}</think>\boxed{43}", 0.0),
        ("drop", r"<think>\boxed{43}</think>\boxed{42}", 1.0),
        ("drop", r"<think>so \boxed{42}", 0.0),
        ("drop", r"so \boxed{42}", 1.0),
        ("required", r"so \boxed{42}", 0.0),
        ("required", r"so \boxed{43}</think>\boxed{42}", 1.0),
        ("keep", r"<think>so \boxed{42}", 1.0),
        ("drop", "<think>" + "so " * 3000 + "</think>" + "#### 42", 1.0),
        ("drop", "<think>" + r"so \boxed{42}" * 3000, 0.0),
    ],
)
def test_only_what_follows_the_thinking_counts(
    thinking: str, response: str, expected: float
) -> None:
    assert loading.load("math_answer", {"thinking": thinking})(sample(response, "42")) == expected


def test_the_thinking_of_a_reference_is_never_required() -> None:
    score: Any = loading.load("math_answer", {"thinking": "required"})
    assert score(sample("</think>#### 42", "#### 42")) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("We get 3 and then 42.", 1.0),
        (r"<think>\boxed{42}</think>\boxed{43}", 0.0),
        (r"<think>so \boxed{42}", 0.0),
        ("We get 42 and then 3.", 0.0),
        ("Hence $x = 42$ apples.", 1.0),
        ("#### Ann has 5 apples and Bob has 42", 0.0),
        ("#### She has 42 apples", 1.0),
        (r"\boxed{41}. Final answer: 42", 1.0),
        (r"\boxed{42}. I hope that the final answer is right.", 1.0),
        ("Answer: 41 was a guess.\nAnswer: 42<|im_end|>", 1.0),
    ],
)
def test_where_the_answer_is_in_prose(score: Any, response: str, expected: float) -> None:
    assert value_of(score, response, "42") == expected
