"""Supervised masks: what the assistant says and its end of turn, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_templates import STYLES, make_style_folder
from template_models import make_tokenizer_folder

from rlearner_text.config import TinyModel
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.rows.messages import check_messages
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

CHAT = [
    {"role": "system", "content": "be"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "U"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "DR"},
]


def test_mask_by_hand(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path, TinyModel())
    tokenizer = Tokenizer.load(tmp_path)
    ids, mask = encode_supervised(tokenizer, CHAT)
    assert ids == tokenizer.encode_chat(CHAT, add_generation_prompt=False)
    assert (
        tokenizer.decode(
            [i for i, m in zip(ids, mask, strict=True) if m], skip_special_tokens=False
        )
        == "U<|im_end|>DR<|im_end|>"
    )
    #               system be end  user a b end  assistant U end  user c end  assistant D R end
    assert mask == [*(0, 0, 0, 0), *(0, 0, 0, 0), *(0, 1, 1), *(0, 0, 0), *(0, 1, 1, 1)]


@pytest.mark.parametrize("family", ["qwen2", "llama3", "gemma", "plain"])
def test_trained_tokens_spell_the_answers(family: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path / family, family))
    ids, mask = encode_supervised(tokenizer, CHAT[1:])
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "UDR"
    assert sum(mask) == len(tokenizer.encode("U")) + len(tokenizer.encode("DR")) + 2


def test_answers_of_weight_0_are_shown_and_not_trained(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path, TinyModel())
    tokenizer = Tokenizer.load(tmp_path)
    shown = [{**message, "weight": 0} for message in (CHAT[2], CHAT[4])]
    system, first, _, second, last = CHAT
    ids, mask = encode_supervised(tokenizer, [system, first, shown[0], second, last])
    assert ids == encode_supervised(tokenizer, CHAT)[0]
    assert mask == [0] * (len(ids) - 3) + [1, 1, 1]
    assert encode_supervised(tokenizer, [system, first, shown[0], second, shown[1]]) == (
        ids,
        [0] * len(ids),
    )
    later = [*CHAT[:3], second, shown[1], first, CHAT[2]]
    ids, mask = encode_supervised(tokenizer, later)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "UU"
    assert check_messages([system, {**first, "weight": None}, {**CHAT[2], "weight": 1}])


@pytest.mark.parametrize("family", ["qwen2", "llama3", "gemma", "plain"])
def test_the_first_answers_of_weight_0_are_encoded_as_examples(family: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path / family, family))
    rollout = Conversation(tokenizer, examples=(("ab", "U"),))
    rollout.observe("c")
    messages = [CHAT[1], {**CHAT[2], "weight": 0}, *CHAT[3:]]
    ids, mask = encode_supervised(tokenizer, messages)
    assert ids[: len(rollout)] == list(rollout.token_ids)
    assert not any(mask[: len(rollout)])
    assert all(mask[len(rollout) :])


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ({}, "not a list"),
        ([], "not a list"),
        (["hi"], "message 0 is not an object"),
        ([{"role": "user"}], "message 0 is not an object with the keys role and content"),
        ([{**CHAT[1], "weight": 0}], "message 0: weight is 0 or 1, of an assistant's"),
        ([CHAT[1], {**CHAT[2], "weight": 2}], "message 1: weight is 0 or 1, of an assistant's"),
        ([{"role": "user", "content": 3}], "message 0: role and content must be texts"),
        (
            [{"role": "assistant", "content": "x"}],
            "message 0 has role 'assistant', expected 'user'",
        ),
        ([*CHAT, CHAT[-1]], "message 5 has role 'assistant', expected 'user'"),
        ([CHAT[1], CHAT[0]], "message 1 has role 'system', expected 'assistant'"),
        (CHAT[:2], "the last message must be the assistant's"),
        (CHAT[:1], "the last message must be the assistant's"),
    ],
)
def test_malformed_messages_say_what_is_wrong(messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_messages(messages)
    assert check_messages(CHAT) == CHAT


def test_weights_and_given_messages_with_calls_of_tools(tmp_path: Path) -> None:
    """Only the last answer is trained: the call has weight 0, and the first turns are given."""
    tokenizer = Tokenizer.load(make_style_folder(tmp_path, STYLES["qwen3"]))
    function = {"name": "add", "arguments": {"a": 2}}
    call = [{"type": "function", "function": function}]
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": call, "weight": 0},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ]
    schema = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools = json.dumps([{"type": "function", "function": schema}])
    ids, mask = encode_supervised(tokenizer, chat, tools, num_given=2)
    trained = [token for token, has_loss in zip(ids, mask, strict=True) if has_loss]
    assert "four" in tokenizer.decode(trained, skip_special_tokens=False)
    assert "add" not in tokenizer.decode(trained, skip_special_tokens=False)
    chat[3] = chat[3] | {"weight": 1}
    same_ids, full_mask = encode_supervised(tokenizer, chat, tools)
    assert same_ids == ids
    assert sum(full_mask) > sum(mask)
