"""Question-answer domain: files, rows, epochs, splits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from broker.errors import ConfigError, DataError
from envhub.envs.base import Split
from envhub.envs.text.qa import QuestionAnswer, QuestionAnswerArgs


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(count: int) -> list[object]:
    return [{"question": f"q{i}", "answer": f"a{i}"} for i in range(count)]


def args(path: str, **kwargs: object) -> QuestionAnswerArgs:
    return QuestionAnswerArgs(path=path, **kwargs)  # type: ignore[arg-type]


def asked(env: QuestionAnswer, count: int, split: Split = "train", start: int = 0) -> list[str]:
    return [env.reset(index, split, seed=index).text for index in range(start, start + count)]


def test_an_epoch_meets_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    env = QuestionAnswer(args(write(tmp_path / "a.jsonl", numbered(10)), eval_share=0))
    first, second = asked(env, 10), asked(env, 10, start=10)
    assert sorted(first) == sorted(second) == [f"q{i}" for i in range(10)]
    assert first != second
    assert first == asked(QuestionAnswer(env.args), 10)
    other = QuestionAnswer(env.args.model_copy(update={"shuffle_seed": 1}))
    assert asked(other, 10) != first


def test_question_and_answer_belong_together_and_one_turn_ends_it(tmp_path: Path) -> None:
    env = QuestionAnswer(
        args(write(tmp_path / "a.jsonl", numbered(10)), template="Q: {question}\nA:")
    )
    observation = env.reset(3, "train", 0)
    assert observation.text == f"Q: {env.prompt}\nA:"
    assert env.reference == env.prompt.replace("q", "a")
    step = env.step("whatever")
    assert (step.done, step.reward, step.valid, step.success) == (True, 0.0, True, False)
    assert not env.step("  ").valid


def test_the_held_out_tail_is_never_trained_on(tmp_path: Path) -> None:
    env = QuestionAnswer(args(write(tmp_path / "a.jsonl", numbered(10)), eval_share=0.2))
    assert QuestionAnswer.num_tasks(env.args, "eval") == 2
    assert asked(env, 4, "eval") == ["q8", "q9", "q8", "q9"]
    assert set(asked(env, 16)) == {f"q{i}" for i in range(8)}


def test_a_file_of_its_own_for_evaluation(tmp_path: Path) -> None:
    path, other = (
        write(tmp_path / "a.jsonl", numbered(4)),
        write(tmp_path / "b.jsonl", [{"question": "x", "answer": 7}]),
    )
    env = QuestionAnswer(args(path, eval_path=other))
    assert asked(env, 1, "eval") == ["x"]
    assert env.reference == "7"
    assert len(set(asked(env, 4))) == 4
    assert QuestionAnswer.data_files(env.args) == [path, other]


def test_parquet_reads_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"ask": ["p", "q"], "say": ["1", "2"], "more": [0, 0]}), path
    )
    env = QuestionAnswer(args(path, question="ask", answer="say", eval_share=0))
    assert sorted(asked(env, 2)) == ["p", "q"]
    with pytest.raises(DataError, match=r"a\.parquet:1: no column 'answer'; it has ask, more, say"):
        QuestionAnswer.check(args(path, question="ask", eval_share=0))
    (tmp_path / "b.parquet").write_bytes(b"no parquet")
    with pytest.raises(
        ConfigError, match=r"^path: .*b\.parquet' is not allowed; not a Parquet file: "
    ):
        QuestionAnswer.check(args(str(tmp_path / "b.parquet")))
    null = str(tmp_path / "c.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"question": ["p", None], "answer": ["1", "2"]}), null
    )
    QuestionAnswer.check(args(null, eval_share=0))
    assert QuestionAnswer.num_tasks(args(null, eval_share=0), "train") == 1


def test_the_reference_may_follow_a_marker(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "1+1 #### is #### 2"}])
    env = QuestionAnswer(args(path, answer_after="####", eval_share=0))
    env.reset(0, "train", 0)
    assert env.reference == "2"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON: "),
        ("[1]", "the row is not an object"),
        (r'{"question": "\ud83d", "answer": "1"}', "not JSON: it holds half of a surrogate pair"),
        ('{"question": "q", "answer": NaN}', "not JSON: it holds NaN"),
        ('{"question": true, "answer": "a"}', "column 'question' holds True, not a text"),
        ('{"question": "q", "answer": ["a"]}', "column 'answer' holds ['a'], not a text"),
        ('{"question": ["q"], "answer": "a"}', "column 'question': message 0 is not an object"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        QuestionAnswer.check(args(str(path)))
    assert str(caught.value).startswith(f"{path}:3: {problem}")


def test_arguments_that_cannot_work_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", numbered(1))
    empty = write(tmp_path / "empty.jsonl", [])
    with pytest.raises(
        ConfigError, match=r"path: 'nowhere\.jsonl' is not allowed; there is no such file"
    ):
        QuestionAnswer.check(args("nowhere.jsonl"))
    with pytest.raises(
        ConfigError, match=r"eval_path: 'nowhere\.jsonl' is not allowed; there is no such file"
    ):
        QuestionAnswer.check(args(path, eval_path="nowhere.jsonl"))
    with pytest.raises(ConfigError, match="the data set holds no rows with an answer"):
        QuestionAnswer.check(args(empty))
    with pytest.raises(ConfigError, match="it leaves no row for training"):
        QuestionAnswer.check(args(path))
    with pytest.raises(ConfigError, match="template: 'hello' is not allowed"):
        QuestionAnswer.check(args(path, template="hello", eval_share=0))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"a file ending in \.jsonl"):
        QuestionAnswer.check(args(str(tmp_path / "a.txt")))


def test_demonstrations_are_the_answers_with_some_mistaken(tmp_path: Path) -> None:
    env = QuestionAnswer(args(write(tmp_path / "a.jsonl", numbered(50)), eval_share=0))
    rng = np.random.default_rng(0)
    env.reset(0, "train", 0)
    assert {env.demonstrate(rng, 0.0) for _ in range(20)} == {env.reference}
    wrong = sum(env.demonstrate(rng, 0.5) != env.reference for _ in range(400))
    assert 150 < wrong < 250
