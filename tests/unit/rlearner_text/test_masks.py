"""Supervised masks: what the assistant says and its end of turn, nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from rlearner_text.config import TinyModel
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


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ({}, "not a list"),
        ([], "not a list"),
        (["hi"], "message 0 is not an object"),
        ([{"role": "user"}], "message 0 is not an object with the keys"),
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
