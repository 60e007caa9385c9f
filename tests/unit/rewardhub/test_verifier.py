"""The reward ``verifier``: choices, numbers, formulas and texts by rules, and the judge where they
cannot decide.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from judge_endpoint import Endpoint, said, serve_endpoint

from broker.settings.config import RewardConfig
from rewardhub.rewards import loading
from rewardhub.rewards.base import NoScore, Sample, Scored
from rewardhub.rewards.verifier import (
    VerifierArgs,
    VerifierReward,
    list_options,
    normalize_text,
)

QUESTION = "Which city is it?\nA) London\nB) Paris\n(C) New York City\n"


def sample(response: str, reference: str, prompt: str = "Which?") -> Sample:
    return Sample(
        domain="d", task_index=3, prompt=prompt, response=response, reference=reference, reward=0.0,
        reward_parts={}, success=False, end="terminated", num_turns=1, num_tokens=4, metrics={},
    )  # fmt: skip


@pytest.fixture(scope="module")
def reward() -> VerifierReward:
    return VerifierReward(VerifierArgs())


@pytest.mark.parametrize(
    ("response", "reference", "value", "note"),
    [
        # choices, by letter and by the text of the option
        ("B", "B", 1.0, "by_choice"),
        ("The answer is (B).", "B", 1.0, "by_choice"),
        ("So I choose C", "B", 0.0, "by_choice"),
        ("Paris", "B", 1.0, "by_choice"),
        ("the answer is New York City.", "B", 0.0, "by_choice"),
        ("C. New York City", "new york city", 1.0, "by_choice"),
        ("I do not know", "B", 0.0, "by_choice"),
        # numbers
        ("It is #### 1,234", "1234", 1.0, "by_number"),
        ("\\boxed{0.50}", "0.5", 1.0, "by_number"),
        ("\\boxed{7}", "8", 0.0, "by_number"),
        ("12 apples", "12", 1.0, "by_number"),
        # formulas
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", 1.0, "by_formula"),
        ("$x(x+1)$", "$x^2 + x$", 1.0, "by_formula"),
        ("\\boxed{x+1}", "$x^2 + x$", 0.0, "by_formula"),
        # texts
        ("The answer is the Eiffel-Tower!", "Eiffel tower", 1.0, "by_text"),
        ("**Mount Everest**", "mount everest.", 1.0, "by_text"),
        ("It is high.\nMount Everest", "Mount Everest", 1.0, "by_text"),
        ("the highest mountain", "Mount Everest", 0.0, "by_text"),
        ("", "Mount Everest", 0.0, "no_answer"),
        ("<think>Mount Everest", "Mount Everest", 0.0, "no_answer"),
        # too large to expand
        ("\\boxed{9^{9^{9^{9}}}}", "$x^2 + x$", 0.0, "too_costly"),
    ],
)
def test_rules(
    reward: VerifierReward, response: str, reference: str, value: float, note: str
) -> None:
    scored = reward.score(sample(response, reference, QUESTION))
    assert scored == Scored(value, {note: 1.0})


def test_correct_and_wrong_are_arguments() -> None:
    reward = VerifierReward(VerifierArgs(correct=2.0, wrong=-1.0))
    assert reward.score(sample("4", "4")) == Scored(2.0, {"by_number": 1.0})
    assert reward.score(sample("5", "4")) == Scored(-1.0, {"by_number": 1.0})


def test_empty_reference_is_a_fault_of_the_data(reward: VerifierReward) -> None:
    with pytest.raises(NoScore, match="no answer in the reference ' '"):
        reward.score(sample("4", " "))


@pytest.mark.parametrize("response", ["{" * 5000, "\\boxed{" * 900, "\x00\ud800", "(" * 3000])
def test_no_response_stops_it(reward: VerifierReward, response: str) -> None:
    for reference in ("4", "$x+1$", "Paris", "B"):
        scored = reward.score(sample(response, reference, QUESTION))
        assert isinstance(scored, Scored)
        assert scored.value == 0.0


def test_options_of_a_question() -> None:
    assert list_options(QUESTION) == {"A": "London", "B": "Paris", "C": "New York City"}
    assert list_options("A. one") == {}
    assert list_options("B) one\nD) two") == {}
    assert list_options("\n" * 100_000) == {}


def test_normalized_texts() -> None:
    assert normalize_text("The  “Well-Known” Man.") == "well known man"
    assert normalize_text("ﬁve ½") == normalize_text("five 1⁄2")
    assert normalize_text("-3.5 %") != normalize_text("3.5 %")
    assert normalize_text("The") == "the"


async def ask(endpoint: Endpoint, *samples: Sample, **args: Any) -> list[Scored]:
    async with serve_endpoint(endpoint) as url:
        reward = VerifierReward(VerifierArgs.model_validate({"judge": {"base_url": url, **args}}))
        await reward.start()
        results = [reward.score(each) for each in samples]
        scores = [each if isinstance(each, Scored) else await each for each in results]
        assert reward._judge is not None
        await reward._judge.client.close()
    return scores


async def test_judge_decides_what_rules_cannot() -> None:
    endpoint = Endpoint(said("It is that mountain. Score: 1"), said("Score: 0"))
    text = sample("I think.\nThe answer is the highest mountain", "Mount Everest")
    prose = msgspec.structs.replace(text, response="Of 3 peaks it is one of 7", reference="9")
    scores = await ask(endpoint, text, prose, price_in=1.0)
    assert [scored.value for scored in scores] == [1.0, 0.0]
    expected = {"by_text": 1.0, "by_judge": 1.0, "asked": 1.0, "tokens_in": 100.0, "cost": 0.0001}
    assert expected.items() <= scores[0].notes.items()
    assert {"by_number": 1.0, "by_judge": 1.0}.items() <= scores[1].notes.items()
    # the judge sees the extracted answer alone
    question = endpoint.asked[0]["messages"][0]["content"]
    assert "[Answer]\nthe highest mountain\n" in question
    assert "[Reference answer]\nMount Everest\n" in question
    assert "I think" not in question


async def test_judge_is_not_asked_where_rules_decide() -> None:
    endpoint = Endpoint(said("Score: 1"))
    samples = [sample("\\boxed{4}", "4"), sample("\\boxed{5}", "4"), sample("", "Paris")]
    scores = await ask(endpoint, *samples)
    assert [scored.value for scored in scores] == [1.0, 0.0, 0.0]
    assert endpoint.asked == []


async def test_answer_right_from_the_threshold_on() -> None:
    endpoint = Endpoint(said("Score: 5"))
    async with serve_endpoint(endpoint) as url:
        for threshold, value in ((0.5, 1.0), (0.51, 0.0)):
            judge = {"base_url": url, "high": 10.0}
            args = VerifierArgs.model_validate({"judge": judge, "judge_threshold": threshold})
            reward = VerifierReward(args)
            await reward.start()
            result = reward.score(sample("the highest mountain", "Mount Everest"))
            assert not isinstance(result, Scored)
            assert (await result).value == value
            assert reward._judge is not None
            await reward._judge.client.close()


def test_it_has_a_process_of_its_own_only_with_a_judge() -> None:
    assert loading.concurrency_of(RewardConfig(name="verifier")) is None
    args = {"judge": {"base_url": "http://127.0.0.1:9/v1", "max_concurrency": 3, "timeout_s": 7}}
    settings = loading.concurrency_of(RewardConfig(name="verifier", args=args))
    assert settings == loading.ConcurrencySettings(3, 7.0, on_gpu=False)
