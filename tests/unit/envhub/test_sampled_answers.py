"""Answers that an agent sends back are found again, and others are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from envhub.agents.sampled_answers import SampledAnswers
from rlearner_text.anthropic.messages import PromptBody, chat_of
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody, parse
from rlearner_text.openai.tool_calls import prefix_of
from rlearner_text.tokenizer import Tokenizer

PREFIX = prefix_of("a" * 24, 0)
OTHER = prefix_of("b" * 24, 0)
CALL = '<think>so</think>ok\n<tool_call>\n{"name": "f", "arguments": {"n": 2.0, "b": true}}\n</tool_call>'
HELLO = {"role": "user", "content": "hello"}
THOUGHT = {"type": "thinking", "thinking": "so", "signature": PREFIX}
WORDS = {"type": "text", "text": "ok"}
USE = {"type": "tool_use", "id": f"{PREFIX}00", "name": "f", "input": {"b": True, "n": 2}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


def messages_body(*messages: dict[str, Any]) -> ChatBody:
    return chat_of(parse(json.dumps({"messages": messages}).encode(), PromptBody))


def chat_body(*messages: dict[str, Any]) -> ChatBody:
    return parse(json.dumps({"messages": messages}).encode(), ChatBody)


def answers_of(tokenizer: Tokenizer, text: str, stops: tuple[str, ...] = ()) -> SampledAnswers:
    """The answers of an episode that has answered ``HELLO`` with a text."""
    answers = SampledAnswers(tokenizer)
    answers.add_prompt([1, 2], messages_body(HELLO))
    ids = [*tokenizer.encode(text), tokenizer.eos_token_ids[0]]
    answers.add_answer(PREFIX, [1, 2], ids, stops)
    return answers


def find(answers: SampledAnswers, content: Any, *before: dict[str, Any]) -> str | None:
    body = messages_body(*(before or (HELLO,)), {"role": "assistant", "content": content})
    texts = answers.find_texts(body)
    assert texts.keys() <= {len(body.messages) - 1}
    return texts.get(len(body.messages) - 1)


@pytest.mark.parametrize(
    ("content", "is_found"),
    [
        ([THOUGHT, WORDS, USE], True),
        ([WORDS, USE], True),
        ([THOUGHT | {"thinking": ""}, WORDS, USE], True),
        ([WORDS | {"text": "ok "}, USE], True),
        ([THOUGHT | {"thinking": "no"}, WORDS, USE], False),
        ([WORDS | {"text": "no"}, USE], False),
        ([WORDS], False),
        ([WORDS, USE | {"input": {"b": 1, "n": 2}}], False),
        ([WORDS, USE | {"input": {"b": True, "n": 3}}], False),
        ([WORDS, USE | {"name": "g"}], False),
        ([WORDS, USE, USE | {"id": f"{PREFIX}01"}], False),
        ([WORDS, USE | {"id": f"{OTHER}00"}], False),
    ],
)
def test_answers_with_calls(tokenizer: Tokenizer, content: Any, is_found: bool) -> None:
    expected = CALL if is_found else None
    assert find(answers_of(tokenizer, CALL), content) == expected


FUNCTION = {"name": "f", "arguments": '{"b": true, "n": 2}'}


@pytest.mark.parametrize(
    ("fields", "is_found"),
    [
        ({"reasoning_content": "so"}, True),
        ({"reasoning_content": "\nso "}, True),
        ({"reasoning_content": ""}, True),
        ({"reasoning_content": "no"}, False),
        ({"reasoning_content": "so", "content": "no"}, False),
        ({}, False),  # the text says nothing of it
        ({"content": "<think>so</think>ok"}, True),
    ],
)
def test_clients_may_keep_reasoning_apart(
    tokenizer: Tokenizer, fields: dict[str, Any], is_found: bool
) -> None:
    calls = [{"id": f"{PREFIX}00", "type": "function", "function": FUNCTION}]
    message = {"role": "assistant", "content": "ok", "tool_calls": calls, **fields}
    body = chat_body(HELLO, message)
    expected = {1: CALL} if is_found else {}
    assert answers_of(tokenizer, CALL).find_texts(body) == expected


def test_reasoning_that_is_kept_apart_is_part_of_the_prompt() -> None:
    body = chat_body(HELLO, {"role": "assistant", "content": "ok", "reasoning_content": "so"})
    assert body.messages[1].plain()["content"] == "<think>\nso\n</think>\n\nok"
    with pytest.raises(HttpError, match="reasoning_content is for role 'assistant' only"):
        chat_body(HELLO | {"reasoning_content": "so"})


@pytest.mark.parametrize(
    ("content", "before", "is_found"),
    [
        ("ok", (HELLO,), True),
        ([WORDS], (HELLO,), True),
        ([THOUGHT, WORDS], (HELLO,), True),
        ([THOUGHT | {"signature": ""}, WORDS], (HELLO,), True),
        ([THOUGHT | {"signature": "", "thinking": "no"}, WORDS], (HELLO,), False),
        ([THOUGHT, WORDS], ({"role": "user", "content": "other"},), True),
        ("ok", ({"role": "user", "content": "other"},), False),
        ("no", (HELLO,), False),
    ],
)
def test_answers_without_calls(
    tokenizer: Tokenizer, content: Any, before: tuple[dict[str, Any], ...], is_found: bool
) -> None:
    text = "<think>\nso</think>\nok"
    expected = text if is_found else None
    assert find(answers_of(tokenizer, text), content, *before) == expected


def test_answers_that_look_alike_are_told_apart_by_what_was_said_before(
    tokenizer: Tokenizer,
) -> None:
    answers = answers_of(tokenizer, "<think>a</think>ok")
    turns = [HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
    answers.add_prompt([1, 2, 3], messages_body(*turns))
    answers.add_answer(OTHER, [1, 2, 3], tokenizer.encode("<think>b</think>ok"), ())
    body = messages_body(*turns, {"role": "assistant", "content": [WORDS]})
    assert answers.find_texts(body) == {1: "<think>a</think>ok", 3: "<think>b</think>ok"}


def test_clients_see_the_text_before_a_stop_string(tokenizer: Tokenizer) -> None:
    answers = answers_of(tokenizer, "ok STOP", stops=("STOP",))
    assert find(answers, "ok ") == "ok STOP"


def test_chats_name_answers_by_the_ids_of_their_calls(tokenizer: Tokenizer) -> None:
    answers = answers_of(tokenizer, CALL)

    def ask(content: str, arguments: str) -> dict[int, str]:
        function = {"name": "f", "arguments": arguments}
        call = {"id": f"{PREFIX}00", "type": "function", "function": function}
        answer = {"role": "assistant", "content": content, "tool_calls": [call]}
        return answers.find_texts(chat_body(HELLO, answer))

    assert ask("<think>so</think>ok", '{"b":true,"n":2}') == {1: CALL}
    # without its reasoning it is another answer
    assert ask("ok", '{"b":true,"n":2}') == {}
    assert ask("<think>so</think>ok", '{"b":true,"n":1}') == {}
    assert answers.find_texts(chat_body(HELLO, {"role": "assistant", "content": "ok"})) == {}
