"""Rows of offline training that repeat others, or stand in the held-out rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from learner.offline.config import DataSection, validate_config
from learner.offline.data import load_examples, read_dialogue
from learner.offline.preference_pairs import load_pairs, read_pair
from learner.offline.row_filter import RowFilter, make_filter
from rlearner_text.config import TinyModel
from rlearner_text.rows.columns import Row
from rlearner_text.tiny import build_tiny
from rlearner_text.tokenizer import Tokenizer

SIZES = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64
)
RECIPE = "first peel the apples then cut them into thin slices and bake them slowly"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_tiny(tmp_path_factory.mktemp("filter") / "tiny", SIZES))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_section(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> DataSection:
    held_out = [
        {"prompt": "What is 2 + 2?", "completion": "4"},
        {"prompt": f"Now: {RECIPE}.", "completion": "No."},
    ]
    return DataSection(
        train=write(tmp_path / "train.jsonl", rows),
        eval=write(tmp_path / "eval.jsonl", held_out),
        **settings,
    )


def filter_of(data: DataSection, key: str = "data.train") -> RowFilter:
    return make_filter(data, key, lambda row: (read_dialogue(row),))


def test_conversations_that_repeat_or_are_held_out(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "Where is Rome?", "completion": "In Italy."},
        {"prompt": "where is rome", "completion": "In Italy"},  # the same words
        {"prompt": "Where is Rome?", "completion": "South of Florence."},  # another answer
        {"prompt": "what is 2 + 2", "completion": "four"},  # a held-out question
        {"prompt": f"Say: {RECIPE}!", "completion": "Yes."},  # 14 words of one in a row
        {"prompt": "first peel the apples", "completion": "Done."},  # 4 words
    ]
    data = make_section(tmp_path, rows, deduplicate=True, decontaminate=True)
    with caplog.at_level(logging.WARNING):
        examples = load_examples(data.train, tokenizer, 1000, row_filter=filter_of(data))
    assert len(examples) == 3
    assert [record.getMessage().removeprefix(f"{data.train}: ") for record in caplog.records] == [
        "1 of 6 rows omitted, it repeats an earlier row: line 2",
        "2 of 6 rows omitted, its question stands in the held-out rows: lines 4, 5",
    ]
    # Held-out rows are all kept, and nothing is left out that was not asked for.
    assert filter_of(data, "data.eval") == RowFilter()
    assert filter_of(make_section(tmp_path, rows)) == RowFilter()


def test_pairs_repeat_if_their_question_and_both_answers_do(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    pair = {"prompt": "Where is Rome?", "chosen": "In Italy.", "rejected": "In Spain."}
    rows = [pair, pair | {"rejected": "in spain"}, pair | {"rejected": "In France."}]
    data = make_section(tmp_path, rows, deduplicate=True)
    row_filter = make_filter(data, "data.train", read_pair)
    pairs, num_long = load_pairs(data.train, tokenizer, 1000, row_filter=row_filter)
    assert (len(pairs), num_long) == (2, 0)


def test_a_repeated_call_of_a_tool_is_no_repetition_with_other_arguments() -> None:
    def row(city: str) -> Row:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        question = {"role": "user", "content": "Weather?"}
        return {"messages": [question, {"role": "assistant", "content": "", "tool_calls": [call]}]}

    data = DataSection(train="x.jsonl", deduplicate=True)
    row_filter = filter_of(data)
    cities = ("Rome", "Oslo", "Rome")
    reasons = [row_filter.find_reason((read_dialogue(row(city)),)) for city in cities]
    assert reasons == ["", "", "it repeats an earlier row"]


def test_decontamination_needs_held_out_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [{"prompt": "a", "completion": "b"}])
    config = {"data": {"train": path, "decontaminate": True}}
    with pytest.raises(ConfigError, match=r"data.decontaminate.*without data.eval and data.eval"):
        validate_config("sft", config)
