"""Tokens of episodes for process reward models: each step has one position, whatever it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from process_models import SEPARATOR, make_sample

from rewardhub.rewards.base import NoScore
from rewardhub.rewards.models.process_args import ProcessRewardArgs
from rewardhub.rewards.models.step_tokens import MARK, START, encode_steps
from rlearner_text.config import TinyModel
from rlearner_text.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(TinyModel())
THINKER = tiny_tokenizer(
    TinyModel(),
    chat_template=(
        "{%- for message in messages %}"
        "{{- '<|im_user|>' + message['content'].split('</think>')[-1] + '<|im_end|>' }}"
        "{%- endfor %}"
    ),
)


def arguments(**args: Any) -> ProcessRewardArgs:
    return ProcessRewardArgs(path="a/b", separator=SEPARATOR, **args)


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def test_separators_stand_behind_steps_and_are_scored() -> None:
    sample = make_sample("one\n\ntwo", "three")
    steps = encode_steps(TOKENIZER, sample, arguments())
    assert text_of(steps.token_ids) == (
        "<|im_user|>2 + 2?<|im_end|><|im_assistant|>one#two#<|im_end|>"
        "<|im_user|>go on<|im_end|><|im_assistant|>three#"
    )
    assert [steps.token_ids[at] for at in steps.positions] == TOKENIZER.encode(SEPARATOR) * 3
    assert steps.num_steps == [2, 1]
    assert steps.divide([0.1, 0.2, 0.3], 0.0) == [[0.1, 0.2], [0.3]]


def test_a_template_of_the_arguments_and_a_joiner() -> None:
    args = arguments(template="Q: {prompt} A: {response} .", joiner="\n", split="\n")
    steps = encode_steps(TOKENIZER, make_sample("one\ntwo"), args)
    assert text_of(steps.token_ids) == "Q: 2 + 2? A: one#\ntwo#"
    args = arguments(system_prompt="Be brief.")
    steps = encode_steps(TOKENIZER, make_sample("one"), args)
    assert text_of(steps.token_ids).startswith("<|im_system|>Be brief.<|im_end|><|im_user|>2 + 2?")


def test_a_response_without_messages() -> None:
    sample = replace(make_sample("one"), messages=[], turns=[])
    assert encode_steps(TOKENIZER, sample, arguments()) == encode_steps(
        TOKENIZER, make_sample("one"), arguments()
    )
    sample = replace(make_sample("one", "two"), messages=[], turns=[])
    with pytest.raises(NoScore, match="domain 'd', task 1: the messages of its 2 turns are not"):
        encode_steps(TOKENIZER, sample, arguments())


def test_steps_beyond_the_limit_are_missing() -> None:
    # Nine tokens up to the first step: <|im_user|>, six characters, <|im_end|>, <|im_assistant|>.
    whole = encode_steps(TOKENIZER, make_sample("ab\n\ncd"), arguments())
    assert whole.positions == [11, 14]
    cut = encode_steps(TOKENIZER, make_sample("ab\n\ncd"), arguments(max_length=14))
    assert (len(cut.token_ids), cut.positions, cut.is_truncated) == (14, [11], True)
    assert cut.divide([0.5], 0.0) == [[0.5, 0.0]]
    with pytest.raises(NoScore, match="the prompt alone is longer than max_length, 9 tokens"):
        encode_steps(TOKENIZER, make_sample("ab"), arguments(max_length=9))


def test_thinking_is_shown_to_a_template_that_would_hide_it() -> None:
    sample = make_sample("<think>one\n\ntwo</think>\n\nthree")
    steps = encode_steps(THINKER, sample, arguments())
    assert steps.num_steps == [3]
    assert "two</think>#three#" in THINKER.decode(steps.token_ids, skip_special_tokens=False)
    steps = encode_steps(THINKER, sample, arguments(thinking="drop"))
    assert steps.num_steps == [1]


TEXTS = st.text(alphabet=f"ab#\n <{MARK}{START}", max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_assistant|>", "</think>", "#", "", f"a{MARK}b"]
)


@settings(deadline=None, max_examples=100)
@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_no_text_adds_or_hides_a_step(turns: list[str], prompt: str) -> None:
    steps = encode_steps(TOKENIZER, make_sample(*turns, prompt=prompt), arguments())
    assert len(steps.positions) == sum(steps.num_steps)
    assert len(steps.num_steps) == len(turns)
    end_of_turn = TOKENIZER.token_id("<|im_end|>")
    # Every message before the last turn closes once, if a step follows.
    closed = steps.token_ids[: steps.positions[-1] + 1] if steps.positions else []
    last = max((number for number, count in enumerate(steps.num_steps) if count), default=0)
    assert closed.count(end_of_turn) == (1 + 2 * last if closed else 0)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"template": "{prompt}"}, "template needs {response} once; also allowed: {prompt}"),
        ({"good_token": "+", "bad_token": "+"}, "good_token and bad_token are both '+'"),
    ],
)
def test_arguments_that_cannot_work_are_refused(args: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line.replace("{", r"\{").replace("+", r"\+")):
        arguments(**args)
