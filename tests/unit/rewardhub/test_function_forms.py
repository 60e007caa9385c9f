"""Reward functions in TRL's and verl's form, called with one sample of ours."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from broker.errors import ConfigError
from broker.settings.config import JUDGED_REWARDS, RESPONSE_REWARDS, RewardConfig, reads_episode
from rewardhub.rewards import REWARDS
from rewardhub.rewards.base import NoScore, Sample, SampleTurn, Scored, check_scored
from rewardhub.rewards.function_forms import adapt_function, find_form

QUESTION = {"role": "user", "content": "2+2="}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    ],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "0"}
ANSWER = {"role": "assistant", "content": "It is 4"}
ROW = {
    "prompt": "2+2=",
    "solution": "4",
    "data_source": "sums",
    "reward_model": {"style": "rule", "ground_truth": "four"},
    "extra_info": {"index": 7},
}


def make_sample(**changes: Any) -> Sample:
    return msgspec.structs.replace(
        Sample(
            domain="d", task_index=3, prompt="2+2=", response="It is 4", reference="4", reward=0.5,
            reward_parts={"env": 0.5}, success=True, end="terminated", num_turns=1, num_tokens=4,
            metrics={}, row=ROW, messages=[QUESTION, ANSWER],
            turns=[SampleTurn(message=1, reward=0.5, valid=True, num_tokens=4)],
        ),
        **changes,
    )  # fmt: skip


def tool_sample(**changes: Any) -> Sample:
    turns = [SampleTurn(message=number, reward=0.25, valid=True, num_tokens=2) for number in (1, 3)]
    messages = [QUESTION, CALL, RESULT, ANSWER]
    return make_sample(num_turns=2, max_turns=4, messages=messages, turns=turns, **changes)


def score(function: Callable[..., object], sample: Sample, **args: Any) -> object:
    return adapt_function(function, args)(sample)


def test_own_form_gets_the_sample() -> None:
    def length(sample: Sample, factor: float) -> float:
        return factor * len(sample.response)

    def any_name(episode: Sample) -> float:
        return episode.reward

    assert score(length, make_sample(), factor=0.5) == 3.5
    assert score(any_name, make_sample()) == 0.5


def test_trl_form_gets_texts_and_columns_of_the_row() -> None:
    seen: dict[str, Any] = {}

    def exact(
        completions: list[str], solution: list[str], prompts: Any = None, **columns: Any
    ) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [
            2.0 * text.endswith(answer) for text, answer in zip(completions, solution, strict=True)
        ]

    assert score(exact, make_sample()) == 2.0
    assert seen == {
        "prompts": ["2+2="],
        "completions": ["It is 4"],
        "data_source": ["sums"],
        "reward_model": [ROW["reward_model"]],
        "extra_info": [{"index": 7}],
    }


def test_trl_form_gets_messages_of_a_conversational_row() -> None:
    def count_chars(completions: list[list[dict[str, Any]]], prompts: Any) -> list[float]:
        assert prompts == [[QUESTION]]
        return [float(sum(len(message["content"]) for message in completions[0]))]

    conversational = {**ROW, "prompt": [QUESTION]}
    assert score(count_chars, make_sample(row=conversational)) == 7.0
    # a game or tools, also if the episode ends with its first turn
    assert score(count_chars, make_sample(row={}, max_turns=4)) == 7.0
    assert score(count_chars, tool_sample(row={})) == 8.0
    # a record without messages
    assert score(count_chars, make_sample(max_turns=4, messages=[], turns=[])) == 7.0


def test_trl_form_sees_tool_calls_and_results() -> None:
    def find_calls(completions: list[Any], **columns: Any) -> list[float]:
        assert completions == [[CALL, RESULT, ANSWER]]
        calls = [call for message in completions[0] for call in message.get("tool_calls", ())]
        return [float(len(calls))]

    assert score(find_calls, tool_sample(row={})) == 1.0


def test_trl_results_other_than_a_list_of_numbers() -> None:
    def skips(completions: Any, solution: list[str | None]) -> list[float | None]:
        return [None if answer is None else 1.0 for answer in solution]

    def makes_array(completions: Any) -> Any:
        return np.array([0.25], np.float32)

    def returns_two(completions: Any) -> list[float]:
        return [1.0, 2.0]

    def returns_number(completions: Any) -> float:
        return 1.0

    nulls = dict.fromkeys(ROW)
    assert score(skips, make_sample(row=nulls)) == Scored(0.0, {"not_applicable": 1.0})
    assert check_scored(score(makes_array, make_sample()), 1) == Scored(0.25)
    with pytest.raises(NoScore, match="2 numbers for 1 completion"):
        score(returns_two, make_sample())
    with pytest.raises(NoScore, match="a list of one number for each completion, not float"):
        score(returns_number, make_sample())


def test_trl_form_may_be_a_coroutine() -> None:
    async def exact(completions: list[str], **columns: Any) -> list[float]:
        return [float("4" in completions[0])]

    result = score(exact, make_sample())
    assert inspect.isawaitable(result)
    assert asyncio.run(asyncio.wait_for(result, 10)) == 1.0


def test_verl_form_returns_a_number_or_a_mapping() -> None:
    seen: dict[str, Any] = {}

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> dict[str, object]:
        seen.update(data_source=data_source, solution_str=solution_str)
        seen.update(ground_truth=ground_truth, extra_info=extra_info)
        return {"score": 0.75, "acc": True, "pred": "4", "bad": float("nan")}

    def number(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> bool:
        return solution_str.endswith(ground_truth)

    def no_score(solution_str: str, ground_truth: str) -> dict[str, float]:
        return {"acc": 1.0}

    assert score(compute_score, make_sample()) == Scored(0.75, {"acc": 1.0})
    assert seen == {
        "data_source": "sums",
        "solution_str": "It is 4",
        "ground_truth": "four",
        "extra_info": {"index": 7, "num_turns": 1, "rollout_reward_scores": {"env": 0.5}},
    }
    # without such columns: the domain's name and the reference
    assert check_scored(score(number, make_sample(row={})), 1) == Scored(1.0)
    nulls = dict.fromkeys(ROW)
    assert score(compute_score, make_sample(row=nulls)) == Scored(0.75, {"acc": 1.0})
    assert (seen["data_source"], seen["ground_truth"]) == ("d", "4")
    with pytest.raises(NoScore, match="needs 'score'; it has acc"):
        score(no_score, make_sample())


def test_verl_form_reads_all_turns_and_its_arguments() -> None:
    def compute_score(
        data_source: str, solution_str: str, ground_truth: str, extra_info: Any, factor: float
    ) -> float:
        assert (data_source, solution_str) == ("mine", "\n4\nIt is 4")
        return factor * extra_info["num_turns"]

    assert score(compute_score, tool_sample(), factor=1.5, data_source="mine") == 3.0


def test_a_missing_column_is_named_with_those_there_are() -> None:
    def needs_more(completions: Any, difficulty: list[float]) -> list[float]:
        return difficulty

    with pytest.raises(NoScore, match="'difficulty'; the rows of domain 'd' have the columns prom"):
        score(needs_more, make_sample())
    with pytest.raises(NoScore, match="the columns none"):
        score(needs_more, make_sample(row={}))


def both(completions: Any, solution_str: str) -> float: ...
def sample_and_completions(sample: Any, completions: Any) -> float: ...
def nothing_named(*args: Any, **kwargs: Any) -> float: ...
def trainer(completions: Any, trainer_state: Any, **kwargs: Any) -> float: ...
def verl_with_more(
    data_source: str, solution_str: str, ground_truth: str, weight: float
) -> float: ...
def without(completions: Any) -> float: ...
def two(first: Any, second: Any) -> float: ...
def by_position(completions: Any, /) -> float: ...


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (both, {}, "both.* has both completions and solution_str"),
        (sample_and_completions, {}, "has both sample and completions"),
        (nothing_named, {}, "names no parameter"),
        (trainer, {}, "a function without trainer_state, which only TRL's trainer has"),
        (verl_with_more, {}, "set weight in rewards.args"),
        (without, {"factor": 2}, "takes no argument 'factor'"),
        (two, {}, r"missing a required argument: 'second'; allowed is a function of \(sample"),
        (by_position, {}, "a function that takes completions by keyword"),
    ],
)
def test_an_unclear_function_is_refused(
    function: Callable[..., object], args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refusal:
        find_form(function, args)
    assert "\n" not in str(refusal.value)


def test_rewards_that_read_the_response_alone_get_no_messages() -> None:
    """Messages and rows would make their groups larger for nothing."""
    read_more = {"instruction_following", "process_reward", "implicit_reward"}
    assert {*RESPONSE_REWARDS, *JUDGED_REWARDS} == REWARDS.keys() - read_more
    judge = {"base_url": "http://127.0.0.1:1/v1"}
    for name, args, reads in (
        ("math_answer", {}, False),
        ("judge", judge, False),
        ("judge", {**judge, "template": "{conversation}"}, True),
        ("verifier", {"judge": judge}, False),
        ("rubric", {**judge, "criteria": [{"name": "a", "text": "b"}]}, False),
        ("rubric", judge, True),  # each row has its own criteria
        ("instruction_following", {}, True),
        ("process_reward", {"path": "a/b"}, True),
        ("./mine.py:f", {}, True),
    ):
        assert reads_episode([RewardConfig(name=name, args=args)]) == reads
