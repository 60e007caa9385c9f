"""The math reward: right answers score 1 however they are written, wrong ones 0."""

from __future__ import annotations

import threading
import time

import pytest

from rewardhub.rewards import loading
from rewardhub.rewards.base import NoScore, ResponseFault, Sample, Scored

# Rows in the manner of grade-school word problems: worked solution, then the marker and the number.
ROWS = [
    (
        "Ann has 3 bags with 14 apples each. How many apples?",
        "She has 3*14 = <<3*14=42>>42 apples.\n#### 42",
    ),
    (
        "A car costs $18,000 and a van twice that. Price of the van?",
        "2 x 18,000 = <<2*18000=36000>>36,000 dollars.\n#### 36,000",
    ),
    ("Tom owed $5 and borrowed $7 more. His balance?", "-5 - 7 = <<-5-7=-12>>-12\n#### -12"),
    ("Half of 5 litres?", "5/2 = <<5/2=2.5>>2.5 litres\n#### 2.5"),
    ("Stars in the picture?", "There are 1,234,567 stars.\n#### 1,234,567"),
    ("How many are left?", "None of them: 4 - 4 = 0\n#### 0"),
]


def sample(response: str, reference: str) -> Sample:
    return Sample(
        domain="math", task_index=0, prompt="", response=response, reference=reference, reward=0.0, reward_parts={},
        success=False,
        end="terminated", num_turns=1, num_tokens=5, metrics={},
    )  # fmt: skip


def score(response: str, reference: str, **args: object) -> object:
    return loading.load("math_answer", args)(sample(response, reference))


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
        (r"Therefore \boxed{43}, not 42, or was it \boxed{42}?", "42", 0.0),
        (r"So \boxed{42}, that is \boxed{42}.", "42", 1.0),
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


def test_an_empty_reference_is_an_error_not_a_zero() -> None:
    with pytest.raises(NoScore, match="no answer in the reference"):
        score("#### 42", "Nothing.\n####")


@pytest.mark.parametrize(
    ("response", "reference", "expected"),
    [
        (r"\boxed{5}", r"\boxed{2}, \boxed{3}, \boxed{5}", 0.0),
        (r"\boxed{5}, \boxed{3} and \boxed{2}", r"\boxed{2}, \boxed{3}, \boxed{5}", 1.0),
        (r"$\boxed{-2}$ and $\boxed{1}$", r"\boxed{1,-2}", 1.0),
        (r"\boxed{-2} and \boxed{1}", "1,-2", 1.0),
        (r"\boxed{200} and \boxed{100}", r"\boxed{100}, \boxed{200}", 1.0),
        (r"$\boxed{200}, \boxed{100}$", r"\{100,200\}", 1.0),
        (r"\boxed{100}, \boxed{200}", "100200", 0.0),
        ("First $x=\\boxed{3}$. Then we have it.\n\nSo the answer is $\\boxed{7}$", "7", 1.0),
        ("#### 2*3", "6", 1.0),
        ("#### **2*3**", "6", 1.0),
        ("#### 2**10", "1024", 1.0),
        ("#### (100,200)", "100200", 0.0),
        ("#### (100,200)", "(100,200)", 1.0),
        ("#### (200,100)", "(100,200)", 0.0),
        (r"\boxed{100200}", r"\{100,200\}", 0.0),
        (r"#### \{200,100\}", r"\{100,200\}", 1.0),
        ("#### 1 000 000", "1,000,000", 1.0),
        ("#### 5!", "5", 0.0),
        ("#### 2", "2x", 0.0),
        ("#### Step 1: add 3\nSo it is \\boxed{42}", "42", 1.0),
        ("#### Final answer\n$\\boxed{3}$", "42", 0.0),
        (r"\boxed{50}\%", "0.5", 1.0),
        ("#### 0.0", "0.0000001", 0.0),
        ("#### 1e-7", "0.0000001", 1.0),
        (r"\boxed{10^{-20}}", "10^{-30}", 0.0),
        (r"\boxed{\frac{1}{10^{30}}}", "10^{-30}", 1.0),
    ],
)
def test_boxes_factors_and_digit_groups(response: str, reference: str, expected: float) -> None:
    assert score(response, reference) == expected


@pytest.mark.parametrize(
    ("reference", "right", "wrong"),
    [
        ("p - q", r"\boxed{-q + p}", r"\boxed{q - p}"),
        ("(3,4)", "#### (3, 4)", "#### (4, 3)"),
        ("x", "$x$", r"\boxed{y}"),
        ("6 - 5i", r"\boxed{-5i+6}", r"\boxed{5}"),
        ("3+4i", r"\boxed{(2+i)^2}", r"\boxed{(2-i)^2}"),
        ("2,3", r"\boxed{3,2}", r"\boxed{2.3}"),
    ],
)
def test_bare_formulas_are_references(reference: str, right: str, wrong: str) -> None:
    assert score(right, reference) == 1.0
    assert score(reference, reference) == 1.0
    assert score(wrong, reference) == 0.0


@pytest.mark.parametrize(
    "response",
    ["Yes.", "#### **yes**", r"\boxed{\text{yes}}", "I thought long.\nThe answer is yes."],
)
def test_a_reference_in_words_is_compared_as_words(response: str) -> None:
    assert score(response, "yes") == Scored(1.0, {"by_text": 1.0})
    assert score(response, "no") == Scored(0.0, {"by_text": 1.0})


def test_precision_and_strictness_are_arguments() -> None:
    assert score("#### 0.333", "1/3") == 0.0
    assert score("#### 0.333", "1/3", float_rounding=3) == 1.0
    assert score("#### 3.14", "3.14159", float_rounding=2) == 1.0
    assert score(r"\boxed{a+1}", "x+1") == 0.0
    assert score(r"\boxed{a+1}", "x+1", strict=False) == 1.0
    assert score(r"$1 < x < 2$", "(1,2)") == 0.0
    assert score(r"$1 < x < 2$", "(1,2)", allow_set_relation_comp=True) == 1.0


@pytest.mark.parametrize(
    "formula",
    [
        r"10^{10^{10}}",
        "{" * 1500 + "1" + "}" * 1500,
        r"(x+y+z+w)^{200}",
        r"\binom{10^9}{5\cdot 10^8}",
        r"1000000000!",
        r"\prod_{n=1}^{10^9} n",
        "9" * 3000,
        r"\sin(" * 18 + "x" + ")" * 18,
    ],
)
def test_a_costly_answer_is_wrong_and_the_next_one_is_scored(formula: str) -> None:
    scores = loading.load("math_answer", {"cpu_s": 0.5})
    cpu = time.process_time()
    with pytest.raises(ResponseFault, match="too_costly") as caught:
        scores(sample(rf"\boxed{{{formula}}}", "#### 18"))
    assert caught.value.value == 0.0
    assert time.process_time() - cpu < 1.0  # what is bounded is spent in another process
    assert scores(sample(r"\boxed{\frac{36}{2}}", "#### 18")) == 1.0


def test_a_large_number_may_be_the_right_answer() -> None:
    assert score(r"\boxed{10^{10^{10}}}", "10^{10^{10}}") == 1.0
    assert score(r"\boxed{2^{100}}", "1267650600228229401496703205376") == 1.0
    assert score(r"\boxed{20!}", "2432902008176640000") == 1.0


def test_it_works_off_the_main_thread_where_signals_do_not() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(score("#### 42", "#### 42")))
    thread.start()
    thread.join()
    assert results == [1.0]
