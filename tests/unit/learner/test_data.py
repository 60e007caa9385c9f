"""Rows in the forms of TRL, verl and others: the prompts, answers and masks that come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_templates import STYLES, make_style_folder

from bench.support.row_files import write_rows
from broker.errors import DataError
from learner.offline.config import DataSection, OfflineSettings, first_changed_key
from learner.offline.data import TokenizedExample, load_examples
from learner.offline.preference_pairs import load_pairs
from rlearner_text.tokenizer import Tokenizer

# As Qwen3's, but without an empty reasoning block.
TEMPLATE = STYLES["qwen3"].template.replace("(loop.last or reasoning)", "reasoning")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("forms")
    return Tokenizer.load(make_style_folder(folder, STYLES["qwen3"], TEMPLATE))


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def marked(tokenizer: Tokenizer, example: TokenizedExample) -> str:
    """Return the text of an example, what is trained between brackets."""
    text = ""
    was_trained = 0
    for token, is_trained in zip(example.token_ids, example.loss_mask, strict=True):
        text += ("]", "[")[is_trained] if is_trained != was_trained else ""
        text += tokenizer.decode([token], skip_special_tokens=False)
        was_trained = is_trained
    return text + "]" * was_trained


ASK = message("user", "2+2?")
FOUR = message("assistant", "4")
SYSTEM = message("system", "Be short.")
EARLIER = [message("user", "1+1?"), message("assistant", "2")]
SCHEMA = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOL = {"type": "function", "function": SCHEMA}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
WITH_CALLS = [
    ASK,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    message("tool", "4", name="add", tool_call_id="c1"),
    message("assistant", "It is 4."),
]

PLAIN = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n[4<|im_end|>]"
SHORT = f"<|im_start|>system\nBe short.<|im_end|>\n{PLAIN}"
AFTER_TWO = PLAIN.replace("[", "").replace("]", "").replace("2+2?", "1+1?").replace("4<", "2<")
CALLED = (
    "<|im_start|>system\n# Tools\n" + json.dumps(TOOL) + "\n<|im_end|>\n"
    "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    '[<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>]\n'
    "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n[It is 4.<|im_end|>]"
)

# columns of the settings, a row, and what is trained of it
SUPERVISED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "TRL prompt and completion": ({}, {"prompt": "2+2?", "completion": "4"}, PLAIN),
    "TRL message lists": ({}, {"prompt": [SYSTEM, ASK], "completion": [FOUR]}, SHORT),
    "TRL messages": ({}, {"messages": [SYSTEM, ASK, FOUR]}, SHORT),
    "TRL tools": ({}, {"messages": WITH_CALLS, "tools": [TOOL]}, CALLED),
    "tools as JSON": ({}, {"messages": WITH_CALLS, "tools": json.dumps([SCHEMA])}, CALLED),
    "a prompt with an answer": (
        {},
        {"prompt": [*EARLIER, ASK], "completion": "4"},
        f"{AFTER_TWO}\n{PLAIN}",
    ),
    "content parts": (
        {},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
            ]
        },
        PLAIN,
    ),
    "ShareGPT": (
        {},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        PLAIN,
    ),
    "verl": (
        {"completion": "reward_model.ground_truth"},
        {
            "data_source": "sums",
            "prompt": [ASK],
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": 0},
        },
        PLAIN,
    ),
    "verl with nested columns": (
        {"prompt": "extra_info.question", "response": "extra_info.answer"},
        {"extra_info": {"question": "2+2?", "answer": "4"}},
        PLAIN,
    ),
    "our own": ({}, {"prompt": "2+2?", "response": "4"}, PLAIN),
}

PAIR = (PLAIN, PLAIN.replace("[4", "[5"))
FIVE = message("assistant", "5")
PAIRS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "texts": ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, PAIR),
    "messages": ({"prompt": [ASK], "chosen": [FOUR], "rejected": [FIVE]}, PAIR),
    "implicit messages": ({"chosen": [ASK, FOUR], "rejected": [ASK, FIVE]}, PAIR),
    "implicit texts": (
        {"chosen": "2+2? is 4", "rejected": "2+2? is 5"},
        (
            PLAIN.replace("2+2?", "2+2? is").replace("[4", "[ 4"),
            PLAIN.replace("2+2?", "2+2? is").replace("[4", "[ 5"),
        ),
    ),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", SUPERVISED)
def test_supervised_forms(tokenizer: Tokenizer, tmp_path: Path, form: str, ending: str) -> None:
    columns, row, expected = SUPERVISED[form]
    path = write_rows(tmp_path / f"rows.{ending}", [row])
    (example,) = load_examples(path, tokenizer, 1000, columns=columns)
    assert marked(tokenizer, example) == expected


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", PAIRS)
def test_preference_forms(tokenizer: Tokenizer, tmp_path: Path, form: str, ending: str) -> None:
    row, expected = PAIRS[form]
    ((pair,), _) = load_pairs(write_rows(tmp_path / f"rows.{ending}", [row]), tokenizer, 1000)
    assert (marked(tokenizer, pair.chosen), marked(tokenizer, pair.rejected)) == expected


@pytest.mark.parametrize("form", ["TRL tools", "tools as JSON"])
def test_conversations_with_tools_are_what_the_template_renders(
    tokenizer: Tokenizer, tmp_path: Path, form: str
) -> None:
    calls = [{**CALL, "function": {"name": "add", "arguments": {"a": 2}}}]
    messages = [ASK, message("assistant", "", tool_calls=calls), *WITH_CALLS[2:]]
    whole = tokenizer.render_chat(messages, add_generation_prompt=False, tools=[TOOL])
    path = write_rows(tmp_path / "x.jsonl", [SUPERVISED[form][1]])
    (example,) = load_examples(path, tokenizer, 1000)
    assert tokenizer.decode(example.token_ids, skip_special_tokens=False) == whole.rstrip("\n")


def test_several_results_of_one_turn(tokenizer: Tokenizer, tmp_path: Path) -> None:
    asked = message("assistant", "", tool_calls=[CALL, CALL])
    results = [message("tool", "4"), message("tool", "5")]
    row = {"messages": [ASK, asked, *results, FOUR], "tools": [TOOL]}
    (example,) = load_examples(write_rows(tmp_path / "x.jsonl", [row]), tokenizer, 1000)
    text = marked(tokenizer, example)
    assert text.endswith(
        "</tool_call><|im_end|>]\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n[4<|im_end|>]"
    )
    assert text.count('{"name": "add", "arguments": {"a": 2}}') == 2


@pytest.mark.parametrize(
    ("row", "columns", "problem"),
    [
        (
            {"question": "q", "reward_model": {"ground_truth": "4"}},
            {},
            "expected the columns messages, or prompt and completion (or response); "
            "it has question, reward_model.ground_truth",
        ),
        (
            {"prompt": "q", "info": {"answer": "4"}},
            {"completion": "info.ground_truth"},
            "no column 'info.ground_truth'; it has info.answer, prompt",
        ),
        ({"messages": [ASK, {**FOUR, "image": 1}]}, {}, "message 1 has the key 'image'; known: "),
        (
            {"messages": [ASK, message("assistant", "", tool_calls=[{"function": {}}])]},
            {},
            "message 1: a tool call has no name, or arguments no object",
        ),
        (
            {"messages": [ASK, message("assistant", "", tool_calls=[CALL]), FOUR]},
            {},
            "message 2 has role 'assistant', expected 'tool'",
        ),
        ({"messages": WITH_CALLS, "tools": "[1]"}, {}, "tools is not a list of schemas"),
        ({"messages": WITH_CALLS, "tools": "["}, {}, "not JSON: "),
    ],
)
def test_rows_that_cannot_be_read(
    tokenizer: Tokenizer, tmp_path: Path, row: Any, columns: dict[str, str], problem: str
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError) as caught:
        load_examples(path, tokenizer, 1000, columns=columns)
    assert str(caught.value).startswith(f"{path}:1: {problem}")


def test_counts_are_one_line(
    tokenizer: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "2+2?", "completion": "4"}
    rows = [row, row, row | {"completion": " "}, row | {"completion": "4" * 90}, row | {"n": None}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    with caplog.at_level("INFO", logger="learner.offline.unusable_rows"):
        examples = load_examples(path, tokenizer, 60)
    assert len(examples) == 4
    assert caplog.messages[0] == (f"{path}: 5 rows, 2 duplicates, 1 without an answer, 1 too long")


def test_held_out_rows_may_be_another_split() -> None:
    data = DataSection(train="rows", split="train", eval_split="test", max_rows=9)
    held_out = data.held_out_source()
    assert data.training_source().split == "train"
    assert held_out is not None
    assert (held_out.path, held_out.split, held_out.max_rows) == ("rows", "test", 9)
    assert DataSection(train="rows").held_out_source() is None


def test_runs_without_the_keys_of_data_sets_go_on() -> None:
    settings = OfflineSettings(data=DataSection(train="rows.jsonl")).to_plain()
    older: dict[str, Any] = settings | {"data": {"train": "rows.jsonl", "eval_share": 0.05}}
    assert first_changed_key(older, settings) is None
    assert first_changed_key({**settings, "data": {**settings["data"], "split": "a"}}, settings)
