"""Questions in the forms of TRL and verl: what the policy sees, the reference and the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_templates import STYLES, make_style_folder

from bench.support.row_files import write_rows
from broker.errors import ConfigError, DataError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from envhub.config import check_templates
from envhub.domain import load_domain
from envhub.envs.base import Observation
from envhub.envs.text.qa import QuestionAnswer, QuestionAnswerArgs
from envhub.workers.returned import ReturnedValueError, observation
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.tokenizer import Tokenizer

USER = {"role": "user", "content": "2+2?"}
SYSTEM = {"role": "system", "content": "Be short."}
EARLIER = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
VERL = {
    "data_source": "sums",
    "prompt": [SYSTEM, USER],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3, "split": "train"},
}
VERL_ARGS = {"question": "prompt", "answer": "reward_model.ground_truth"}
BE_SHORT = (("system", "Be short."),)

# env_args, a row, the reference, and the messages before the question
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str, tuple[tuple[str, str], ...]]] = {
    "texts": ({}, {"question": "2+2?", "answer": 4}, "4", ()),
    "GSM8K": ({"answer_after": "####"}, {"question": "2+2?", "answer": "so #### 4"}, "4", ()),
    "TRL": (
        {"question": "prompt", "answer": "solution"},
        {"prompt": [USER], "solution": "4", "level": 1},
        "4",
        (),
    ),
    "TRL without an answer": ({"question": "prompt", "answer": ""}, {"prompt": [USER]}, "", ()),
    "verl": (VERL_ARGS, VERL, "4", BE_SHORT),
    "turns before the question": (
        {"question": "prompt"},
        {"prompt": [SYSTEM, *EARLIER, USER], "answer": "4"},
        "4",
        (*BE_SHORT, ("user", "1+1?"), ("assistant", "2")),
    ),
    "a column with a dot in its name": (
        {"question": "a.b", "answer": "c"},
        {"a.b": "2+2?", "c": "4"},
        "4",
        (),
    ),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_questions(tmp_path: Path, form: str, ending: str) -> None:
    options, row, reference, history = FORMS[form]
    path = write_rows(tmp_path / f"x.{ending}", [row])
    args = QuestionAnswerArgs(path=path, eval_share=0, template="Q: {question}", **options)
    QuestionAnswer.check(args)
    environment = QuestionAnswer(args)
    first = environment.reset(0, "train", seed=0)
    assert observation("reset", first) == Observation("Q: 2+2?", history=history)
    assert (environment.prompt, environment.reference) == ("2+2?", reference)
    assert environment.row == row


def test_messages_before_the_question_open_the_conversation(tmp_path: Path) -> None:
    section = DomainSection(env="qa", env_args={"path": "x.jsonl"}, system_prompt="The domain's.")
    domain = load_domain("sums", section)
    tokenizer = Tokenizer.load(make_style_folder(tmp_path / "model", STYLES["qwen3"]))
    history = (("system", "Be short."), ("user", "1+1?"), ("assistant", "2"))
    conversation = Conversation(tokenizer, *domain.opening_after(history))
    conversation.observe("2+2?")
    text = tokenizer.decode(conversation.token_ids, skip_special_tokens=False)
    expected = tokenizer.render_chat([SYSTEM, *EARLIER, USER], add_generation_prompt=True)
    assert text == expected
    earlier = [EARLIER[0], EARLIER[1] | {"weight": 0}]  # not to train on
    assert domain.messages("2+2?", history) == [SYSTEM, *earlier, USER]
    assert domain.opening_after(())[0] == "The domain's."
    assert domain.opening_after((("user", "1+1?"), ("assistant", "2"))) == (
        "The domain's.",
        "",
        (("1+1?", "2"),),
    )


@pytest.mark.parametrize(
    "history", [(("user", "a"),), (("assistant", "a"), ("user", "b")), ("user",), (("user", 1),)]
)
def test_a_history_of_another_order_is_refused(history: Any) -> None:
    with pytest.raises(ReturnedValueError, match="reset returned a history"):
        observation("reset", Observation("x", history=history))


def test_rows_without_an_answer_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question": "q", "answer": "a"}
    rows = [row, row, row | {"answer": " "}, {"question": "q", "answer": None}, row | {"n": None}]
    args = QuestionAnswerArgs(path=write_rows(tmp_path / "x.jsonl", rows), eval_share=0)
    with caplog.at_level("INFO", logger="envhub.envs.text.rows"):
        QuestionAnswer.check(args)
    assert caplog.messages == [
        f"{args.path}: 5 rows, 2 duplicates, 2 without question or answer (left out)"
    ]
    assert QuestionAnswer.num_tasks(args, "train") == 3
    assert QuestionAnswer.count_rows(args, lambda text: text == "q") == (
        f"{args.path}: 5 rows, 2 duplicates, 2 without question or answer (left out), 3 too long"
    )


def test_a_template_is_tried_with_each_form_of_history(tmp_path: Path) -> None:
    template = (
        "{%- if messages[0].role == 'system' %}{{- raise_exception('no system') }}{%- endif %}"
    )
    folder = make_style_folder(
        tmp_path / "model", STYLES["qwen3"], template + STYLES["qwen3"].template
    )
    rows = [{"q": [USER], "answer": "4"}, {"q": [SYSTEM, USER], "answer": "4"}]
    args = {"path": write_rows(tmp_path / "x.jsonl", rows), "question": "q", "eval_share": 0}
    settings = RunSettings(domains={"sums": DomainSection(env="qa", env_args=args)})
    with pytest.raises(ConfigError, match="no system"):
        check_templates(settings, Tokenizer.load(folder))


def test_a_split_of_its_own_for_evaluation(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_rows(tmp_path / f"{split}-0.jsonl", [{"question": split, "answer": "a"}])
    args = QuestionAnswerArgs(path=str(tmp_path), split="train", eval_split="test")
    QuestionAnswer.check(args)
    environment = QuestionAnswer(args)
    assert environment.reset(0, "train", 0).text == "train"
    assert environment.reset(0, "eval", 0).text == "test"
    assert QuestionAnswer.data_files(args) == [str(tmp_path)]


@pytest.mark.parametrize(
    ("options", "row", "problem"),
    [
        (
            {"question": "prompt", "answer": "ground_truth"},
            VERL,
            "no column 'ground_truth'; it has ability, data_source, extra_info.index, "
            "extra_info.split, prompt, reward_model.ground_truth, reward_model.style",
        ),
        (
            VERL_ARGS,
            VERL | {"prompt": [USER, *EARLIER[1:]]},
            "column 'prompt': the last message must be the user's",
        ),
        (
            VERL_ARGS,
            VERL | {"prompt": [USER, USER]},
            "column 'prompt': message 1 has role 'user', expected 'assistant'",
        ),
        (
            VERL_ARGS,
            VERL | {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "column 'prompt': message 0: role and content must be texts",
        ),
    ],
)
def test_rows_that_cannot_be_asked(
    tmp_path: Path, options: dict[str, str], row: dict[str, Any], problem: str
) -> None:
    path = write_rows(tmp_path / "x.jsonl", [row])
    with pytest.raises(DataError) as caught:
        QuestionAnswer.check(QuestionAnswerArgs(path=path, eval_share=0, **options))
    assert str(caught.value) == f"{path}:1: {problem}"


@pytest.mark.parametrize("num_turns", [1, 200])
def test_a_row_with_a_long_history_does_not_refuse_its_domain(
    tmp_path: Path, num_turns: int
) -> None:
    rows = [{"question": [*EARLIER * num_turns, USER], "answer": "4"}]
    path = write_rows(tmp_path / "x.jsonl", rows)
    tokenizer = Tokenizer.load(make_style_folder(tmp_path / "model", STYLES["qwen3"]))
    domain = {"env": "qa", "env_args": {"path": path, "eval_share": 0}, "max_context_tokens": 100}
    check_templates(RunSettings.model_validate({"domains": {"sums": domain}}), tokenizer)
