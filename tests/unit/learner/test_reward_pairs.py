"""Tokens of pairs for a reward model: the whole conversation, as reward hubs encode it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import DataError
from learner.offline.preference_pairs import load_pairs
from learner.offline.reward_pairs import encode_whole, sample_pair
from rlearner_text.config import TinyModel
from rlearner_text.tiny import tiny_tokenizer
from rlearner_text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer(TinyModel())


def load(path: Path, rows: list[Any], tokenizer: Tokenizer, max_tokens: int = 100) -> list[Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, _ = load_pairs(path, tokenizer, max_tokens, encode=encode_whole)
    return pairs


def test_the_end_of_the_whole_conversation_is_scored(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": "ab", "chosen": "U", "rejected": "DD"}
    (pair,) = load(tmp_path / "pairs.jsonl", [row], tokenizer)
    text = "<|im_user|>ab<|im_end|><|im_assistant|>U<|im_end|>"
    assert tokenizer.decode(pair.chosen.token_ids, skip_special_tokens=False) == text
    chosen, rejected = sample_pair(pair)
    # A token of no meaning behind the end, which alone is trained, so the end predicts it.
    assert chosen.num_inputs == len(pair.chosen.token_ids) == 7
    assert chosen.positions.tolist() == [7]
    assert rejected.positions.tolist() == [8]
    assert chosen.advantages.tolist() == [0.0] * 7 + [1.0]


def test_special_tokens_in_texts_are_plain_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"prompt": "a<|im_end|>", "chosen": "U", "rejected": "D"}
    (pair,) = load(tmp_path / "pairs.jsonl", [row], tokenizer)
    assert pair.chosen.token_ids.count(tokenizer.token_id("<|im_end|>")) == 2


def test_padding_at_the_end_is_left_out(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}{{- message['content'] + '<|endoftext|>' }}{%- endfor %}"
    )
    padded = tiny_tokenizer(TinyModel(), chat_template=template)
    row = {"prompt": "a", "chosen": "U", "rejected": "DD"}
    (pair,) = load(tmp_path / "pairs.jsonl", [row], padded)
    assert padded.decode(pair.chosen.token_ids, skip_special_tokens=False) == "a<|endoftext|>U"


def test_equal_answers_are_refused_with_their_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": "a", "chosen": "U", "rejected": "D"},
        {"prompt": "a", "chosen": "U", "rejected": "U"},
    ]
    path = tmp_path / "pairs.jsonl"
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: chosen and rejected are the same, or"):
        load(path, rows, tokenizer)
    # These differ as texts, and not in the template, which cuts white space off.
    template = "{%- for message in messages %}{{- message['content'] | trim }}{%- endfor %}"
    trims = tiny_tokenizer(TinyModel(), chat_template=template)
    rows[1] = {"prompt": "a", "chosen": "U", "rejected": "U "}
    with pytest.raises(DataError, match=r"pairs\.jsonl:2: chosen and rejected are the same in the"):
        load(path, rows, trims)


def test_a_pair_that_is_too_long_is_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"prompt": "a", "chosen": "U", "rejected": "D"},
        {"prompt": "a", "chosen": "U", "rejected": "D" * 9},
    ]
    assert len(load(tmp_path / "pairs.jsonl", rows, tokenizer, 6)) == 1
