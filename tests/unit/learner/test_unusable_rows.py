"""Rows that cannot be trained are counted and reported with their first lines."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from model_templates import STYLES, ModelStyle, make_style_folder

from broker.errors import ConfigError, DataError
from learner.offline.data import load_examples
from learner.offline.preference_pairs import load_pairs
from rlearner_text.tokenizer import Tokenizer

STRICT = ModelStyle(
    "{%- if messages[0].role == 'system' %}{{- raise_exception('no system messages') }}{%- endif %}"
    + STYLES["qwen3"].template,
    STYLES["qwen3"].special,
    "<|im_end|>",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_style_folder(tmp_path_factory.mktemp("strict"), STRICT))


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: str, answer: str, *, system: bool = False) -> dict[str, Any]:
    first = [{"role": "system", "content": "s"}] if system else []
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*first, *turns]}


def test_conversations(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long, cut, refused = chat("q" * 200, "a"), chat("q", "a " * 200), chat("q", "a", system=True)
    rows = [chat("q", "a"), long, refused, long, cut, long, long]
    path = write(tmp_path / "x.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        examples = load_examples(path, tokenizer, 100)
    assert [len(example.token_ids) for example in examples][1:] == [100]
    assert [record.getMessage().removeprefix(f"{path}: ") for record in caplog.records] == [
        "4 of 7 rows omitted, the first answer begins beyond data.max_tokens, or the model's limit: lines 2, 4, 6, …",
        "1 of 7 rows omitted, its chat template rejects messages of the roles system, user, assistant, user: "
        "no system messages: line 3",
        "1 of 7 rows cut, longer than 100 tokens: line 5",
    ]


def test_pairs(tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fine = {"prompt": "p", "chosen": "c", "rejected": "r"}
    path = write(
        tmp_path / "x.jsonl", [fine, fine | {"chosen": "c" * 200}, fine | {"rejected": "r" * 300}]
    )
    with caplog.at_level(logging.WARNING):
        pairs, num_long = load_pairs(path, tokenizer, 100)
    assert (len(pairs), num_long) == (1, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"{path}: 2 of 3 rows omitted, an answer ends beyond data.max_tokens, or "
    )
    assert record.getMessage().endswith(": lines 2, 3")


def test_no_row_left(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", [chat("q", "a", system=True)] * 2)
    with pytest.raises(
        DataError,
        match=r"x\.jsonl:2: no row has an assistant's answer within 100 tokens: its chat template rejects messages",
    ):
        load_examples(path, tokenizer, 100)
    with pytest.raises(DataError, match=r"x\.jsonl:0: .*: the file is empty"):
        load_examples(write(path, []), tokenizer, 100)


def test_without_a_template_the_rows_are_not_to_blame(tmp_path: Path) -> None:
    folder = make_style_folder(tmp_path / "model", STRICT)
    (folder / "chat_template.jinja").unlink()
    path = write(tmp_path / "x.jsonl", [chat("q", "a")])
    with pytest.raises(ConfigError, match="no chat template"):
        load_examples(path, Tokenizer.load(folder), 100)
