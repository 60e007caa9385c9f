"""Repeated questions, and those of evaluation sets, are left out of training and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from broker.errors import ConfigError
from envhub.envs.text.qa import QuestionAnswer, QuestionAnswerArgs
from envhub.envs.text.rows import QuestionRow
from envhub.envs.text.training_rows import CleaningRule, clean_rows
from rlearner_text.rows.overlap import QuestionIndex, split_words

LONG = "one two three four five six seven eight"


def write_rows(path: Path, questions: list[str]) -> str:
    lines = (json.dumps({"question": text, "answer": "1"}) + "\n" for text in questions)
    path.write_text("".join(lines))
    return str(path)


def args_of(path: str, **values: Any) -> QuestionAnswerArgs:
    args = QuestionAnswerArgs(path=path, **values)
    QuestionAnswer.check(args)
    return args


def questions_of(args: QuestionAnswerArgs) -> set[str]:
    count = QuestionAnswer.num_tasks(args, "train")
    assert count is not None
    environment = QuestionAnswer(args)
    return {environment.reset(task, "train", 0).text for task in range(count)}


def test_words_are_compared_without_case_punctuation_and_width() -> None:
    assert split_words("What's  2+2?") == split_words("what S 2 2") == ["what", "s", "2", "2"]
    assert split_words("ＡＢ") == ["ab"]


def test_overlap_of_a_run_of_words() -> None:
    index = QuestionIndex(4)
    index.update([LONG])
    assert index.overlaps("x three FOUR, five six y")
    assert not index.overlaps("three four five x six")
    # Shorter questions only count as a whole.
    index.update(["a b"])
    assert index.overlaps("A, b!")
    assert not index.overlaps("a b c")


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=9), st.integers(1, 4))
def test_overlap_is_a_common_run(words: list[str], num_words: int) -> None:
    """By its definition: any run of one in any run of the other."""
    other = ["a", "b", "a", "c", "b"]
    index = QuestionIndex(num_words)
    index.update([" ".join(other)])

    def runs(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + num_words]) for i in range(len(text) - num_words + 1)}

    expected = words == other or bool(runs(words) & runs(other))
    assert index.overlaps(" ".join(words)) == expected


def test_counts_of_rows_left_out() -> None:
    rows = tuple(QuestionRow(text, "") for text in ("a b", "A  b.", f"{LONG} nine", "new"))
    cleaned = clean_rows([rows], [QuestionRow(LONG, "")], CleaningRule(True, True, 8))
    assert [row.question for row in cleaned.rows] == ["a b", "new"]
    assert str(cleaned) == "1 repeated (left out), 1 in evaluation sets (left out)"
    untouched = clean_rows([rows], [QuestionRow(LONG, "")], CleaningRule(False, False, 8))
    assert (untouched.rows, str(untouched)) == (rows, "")


def test_same_question_after_other_turns_is_not_repeated() -> None:
    rows = (
        QuestionRow("and now?", "", (("user", "1"), ("assistant", "2"))),
        QuestionRow("and now?", "", (("user", "3"), ("assistant", "4"))),
    )
    assert clean_rows([rows], [], CleaningRule(True, False, 8)).rows == rows


def test_decontaminated_data_set(tmp_path: Path) -> None:
    """The rows of evaluation, of further sets and repeated ones; counted in one line."""
    path = write_rows(tmp_path / "train.jsonl", ["a", "b", "B!", "c", f"x {LONG} y"])
    held_out = write_rows(tmp_path / "eval.jsonl", ["C."])
    further = write_rows(tmp_path / "bench.jsonl", [LONG])
    args = args_of(
        path,
        eval_path=held_out,
        deduplicate=True,
        decontaminate=True,
        eval_sets=further,
        overlap_words=5,
    )
    assert questions_of(args) == {"a", "b"}
    assert QuestionAnswer.count_rows(args, lambda text: False) == (
        "training: 2 rows, 1 repeated (left out), 2 in evaluation sets (left out)"
    )
    assert further in QuestionAnswer.data_files(args)


def test_share_for_evaluation_is_not_trained_on_again(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", ["a", "b", "c", "A"])
    args = args_of(path, eval_share=0.25, decontaminate=True)
    assert questions_of(args) == {"b", "c"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"eval_sets": "x.jsonl"}, "eval_sets"),
        ({"eval_sets": "x.jsonl", "decontaminate": True}, "eval_sets"),
        ({"files": [{"file": "a.jsonl"}]}, "files"),
    ],
)
def test_impossible_arguments(tmp_path: Path, values: dict[str, Any], key: str) -> None:
    path = write_rows(tmp_path / "train.jsonl", ["a", "b"])
    with pytest.raises(ConfigError) as caught:
        args_of(path, **values)
    assert caught.value.key == key


def test_rows_that_are_all_evaluated_are_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "train.jsonl", ["a", "b"])
    with pytest.raises(ConfigError, match="all of them are left out"):
        args_of(path, eval_path=path, decontaminate=True)


def test_files_are_numbered_one_after_the_other(tmp_path: Path) -> None:
    write_rows(tmp_path / "easy.jsonl", ["a", "b", "c"])
    write_rows(tmp_path / "hard.jsonl", ["d", "e"])
    args = args_of(
        str(tmp_path),
        files=[{"file": "hard.jsonl", "weight": 2.0}, {"file": "easy.jsonl", "weight": 1.0}],
        eval_share=0,
    )
    assert QuestionAnswer.is_mixed(args)
    assert QuestionAnswer.task_parts(args) == [(2, 2.0), (3, 1.0)]
    environment = QuestionAnswer(args)
    texts = [environment.reset(task, "train", 0).text for task in range(6)]
    assert texts == ["d", "e", "a", "b", "c", "d"]
    keys = QuestionAnswer.task_keys(args)
    assert keys is not None
    assert len(set(keys)) == 5


def test_files_named_twice_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(ConfigError, match="files below"):
        args_of(str(tmp_path), files=[{"file": "a.jsonl"}, {"file": "a.jsonl"}])


@pytest.mark.parametrize("name", ["../a.jsonl", "/a.jsonl", "b/../../a.jsonl", ""])
def test_files_elsewhere_are_refused(name: str) -> None:
    """By the arguments themselves: a host that joins opens no file of another owner's choice."""
    with pytest.raises(ValidationError, match="the name of a file below path"):
        QuestionAnswerArgs(path="data", files=[{"file": name}])


def test_held_out_share_is_taken_of_each_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", ["a", "b"])
    write_rows(tmp_path / "b.jsonl", ["c", "d"])
    args = args_of(str(tmp_path), files=[{"file": "a.jsonl"}, {"file": "b.jsonl"}], eval_share=0.5)
    environment = QuestionAnswer(args)
    assert [environment.reset(task, "eval", 0).text for task in range(2)] == ["b", "d"]
    assert questions_of(args) == {"a", "c"}
