"""The math reward: right answers score 1 however they are written, wrong ones 0."""

from __future__ import annotations

import threading

import pytest

from rewardhub.rewards import function
from rewardhub.rewards.base import Sample

# Rows in the manner of grade-school word problems: worked solution, then the marker and the number.
ROWS = [
    ("Ann has 3 bags with 14 apples each. How many apples?", "She has 3*14 = <<3*14=42>>42 apples.\n#### 42"),
    ("A car costs $18,000 and a van twice that. Price of the van?", "2 x 18,000 = <<2*18000=36000>>36,000 dollars.\n#### 36,000"),
    ("Tom owed $5 and borrowed $7 more. His balance?", "-5 - 7 = <<-5-7=-12>>-12\n#### -12"),
    ("Half of 5 litres?", "5/2 = <<5/2=2.5>>2.5 litres\n#### 2.5"),
    ("Stars in the picture?", "There are 1,234,567 stars.\n#### 1,234,567"),
    ("How many are left?", "None of them: 4 - 4 = 0\n#### 0"),
]


def sample(response: str, reference: str) -> Sample:
    return Sample(
        domain="math", task_index=0, prompt="", response=response, reference=reference, reward=0.0, reward_parts={}, success=False,
        end="terminated", num_turns=1, num_tokens=5, metrics={},
    )  # fmt: skip


def score(response: str, reference: str, **args: object) -> object:
    return function.load("math_answer", args)(sample(response, reference))


@pytest.mark.parametrize(("question", "answer"), ROWS)
def test_a_reference_solution_scores_one_and_another_rows_zero(question: str, answer: str) -> None:
    bare = answer.rpartition("####")[2].strip()
    assert score(answer, answer) == 1.0
    assert score(answer, bare) == 1.0
    for _, other in ROWS:
        if other != answer:
            assert score(other, answer) == 0.0


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        ("so it is 42", "#### 42", 1.0),
        ("so it is 41", "#### 42", 0.0),
        (r"Therefore \boxed{42}.", "42", 1.0),
        (r"Therefore \boxed{43}, not 42, or was it \boxed{42}?", "42", 1.0),
        ("1 + 1 is 2\n#### 3", "#### 2", 0.0),
        ("#### 2\nno, wait\n#### 3", "#### 3", 1.0),
        ("#### 36000", "#### 36,000", 1.0),
        ("#### $36,000.", "#### 36,000", 1.0),
        ("#### $36,000.00", "36000", 1.0),
        ("#### **42**", "#### 42", 1.0),
        ("#### 42 apples", "#### 42", 1.0),
        ("#### 2.50", "#### 2.5", 1.0),
        ("#### 5/2", "#### 2.5", 1.0),
        (r"#### \frac{5}{2}", "#### 2.5", 1.0),
        ("####", "#### 42", 0.0),
        ("####\n\n42", "#### 42", 1.0),
        ("", "#### 42", 0.0),
        ("I do not know", "#### 42", 0.0),
        ("#### 3,6000", "#### 36000", 0.0),
        (r"$x = \frac{1}{3}$", r"$\frac{2}{6}$", 1.0),
        (r"$2x + 2$", r"$2(x+1)$", 1.0),
    ],
)
def test_answers_as_they_come(response: str, reference: str, expected: float) -> None:
    assert score(response, reference) == expected


def test_the_marker_and_the_amounts_are_arguments() -> None:
    assert score("A: 7", "A: 7", answer_after="A:", correct=2.0, wrong=-1.0) == 2.0
    assert score("A: 8", "A: 7", answer_after="A:", correct=2.0, wrong=-1.0) == -1.0
    assert score("A: 8\n#### 7", "7", answer_after="A:") == 0.0


def test_only_the_end_of_a_long_response_is_read() -> None:
    assert score("9 " * 100_000 + "\n#### 42", "42") == 1.0


def test_a_reference_without_an_answer_is_an_error_not_a_zero() -> None:
    with pytest.raises(ValueError, match="no mathematical answer in the reference"):
        score("#### 42", "#### none that I can see")


def test_it_works_off_the_main_thread_where_signals_do_not() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(score("#### 42", "#### 42")))
    thread.start()
    thread.join()
    assert results == [1.0]
