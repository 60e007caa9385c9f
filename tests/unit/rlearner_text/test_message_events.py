"""Answers of /v1/messages: content blocks, and events that add up to them. No network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.anthropic.errors import error_body
from rlearner_text.anthropic.message_events import MessagesFormat
from rlearner_text.anthropic.messages import MessagesBody, chat_of
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import parse
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.template_rules import takes_late_system
from rlearner_text.tokenizer import Tokenizer

ADD = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'
REASONING = "<think>\n17?\n</think>\n\n"
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
OMITS = {"thinking": {"type": "adaptive", "display": "omitted"}}
# how the ids of calls of an answer with id 1 begin: call_, the id, the number of the choice
PREFIX = "call_1000"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


def form(tokenizer: Tokenizer, **fields: Any) -> MessagesFormat:
    body = {"max_tokens": 99, "messages": [{"role": "user", "content": "hello"}], **fields}
    parsed = parse(json.dumps(body).encode(), MessagesBody)
    chat = chat_of(parsed)
    return MessagesFormat(parsed, chat, tokenizer, AnswerWriter(chat, tokenizer, "actor", "1"))


def choice_of(ids: Sequence[int], reason: wire.FinishReason = "stop") -> AnswerChoice:
    reply = wire.GenerateReply(
        request_id="x",
        server="s",
        token_ids=wire.column(ids, "<i4"),
        logprobs=wire.column([-0.5] * len(ids), "<f4"),
        finish_reason=reason,
        version_runs=wire.column([7, len(ids)], "<i4"),
        policy_version=7,
        prefix_hit_tokens=2,
    )
    return AnswerChoice(0, [4, 5, 6], reply)


def answer_of(tokenizer: Tokenizer, text: str) -> AnswerChoice:
    return choice_of([*tokenizer.encode(text), tokenizer.eos_token_ids[0]])


def test_an_answer_is_reasoning_text_and_calls(tokenizer: Tokenizer) -> None:
    answer = answer_of(tokenizer, f"{REASONING}I add.\n{CALL}")
    message = form(tokenizer, tools=[ADD], **THINKS).whole([answer])
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "actor",
        "content": [
            {"type": "thinking", "thinking": "17?", "signature": PREFIX},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": f"{PREFIX}00", "name": "add", "input": {"a": 17}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        # three tokens of the prompt, two of them from the cache
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": len(answer.reply.token_ids.array()),
        },
    }


@pytest.mark.parametrize(
    ("fields", "text", "content"),
    [
        ({}, f"{REASONING}so", [{"type": "text", "text": "so"}]),
        ({}, " so ", [{"type": "text", "text": " so "}]),
        ({}, "", [{"type": "text", "text": ""}]),
        ({}, "<think>no end", [{"type": "text", "text": ""}]),
        (
            OMITS,
            f"{REASONING}so",
            [
                {"type": "thinking", "thinking": "", "signature": PREFIX},
                {"type": "text", "text": "so"},
            ],
        ),
        (THINKS, "<think>\n\n</think>\n\nso", [{"type": "text", "text": "so"}]),
        (
            {"tools": [ADD]},
            CALL,
            [{"type": "tool_use", "id": f"{PREFIX}00", "name": "add", "input": {"a": 17}}],
        ),
    ],
    ids=["hidden", "plain", "nothing", "unclosed", "omitted", "empty", "call"],
)
def test_blocks_of_an_answer(
    tokenizer: Tokenizer, fields: dict[str, Any], text: str, content: list[dict[str, Any]]
) -> None:
    assert form(tokenizer, **fields).content(answer_of(tokenizer, text)) == content


def test_why_an_answer_ended(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    stops = form(tokenizer, stop_sequences=["three", "two"])
    reasons = [
        (stops, choice_of(ids), ("stop_sequence", "two")),
        (stops, answer_of(tokenizer, "one"), ("end_turn", None)),
        (stops, choice_of(tokenizer.encode("one"), "length"), ("max_tokens", None)),
        (stops, choice_of(tokenizer.encode("one"), "abort"), ("max_tokens", None)),
        (
            form(tokenizer, tools=[ADD]),
            choice_of(tokenizer.encode(CALL), "length"),
            ("tool_use", None),
        ),
    ]
    for answer_form, choice, expected in reasons:
        message = answer_form.whole([choice])
        assert (message["stop_reason"], message["stop_sequence"]) == expected
    assert stops.whole([choice_of(ids)])["content"] == [{"type": "text", "text": "one "}]


def test_tokens_are_sent_on_request(tokenizer: Tokenizer) -> None:
    choice = answer_of(tokenizer, "yes")
    ids = choice.reply.token_ids.array().tolist()
    tokens = {
        "prompt_token_ids": [4, 5, 6],
        "token_ids": ids,
        "version_runs": [[7, len(ids)]],
        "policy_version": 7,
    }
    wanted = form(tokenizer, return_token_ids=True)
    assert tokens.items() <= wanted.whole([choice]).items()
    assert tokens.items() <= wanted.events(0, [4, 5, 6]).last(choice)[-2].items()
    assert not tokens.keys() & form(tokenizer).whole([choice]).keys()


def test_the_events_of_a_short_answer(tokenizer: Tokenizer) -> None:
    sent = (
        form(tokenizer, **THINKS)
        .events(0, [4, 5, 6])
        .last(answer_of(tokenizer, "<think>a</think>b"))
    )
    start, ping, *blocks, delta, stop = sent
    assert start["type"] == "message_start"
    assert (start["message"]["content"], start["message"]["usage"]["input_tokens"]) == ([], 3)
    assert (ping, stop) == ({"type": "ping"}, {"type": "message_stop"})
    thinking = {"type": "thinking", "thinking": "", "signature": ""}
    assert blocks == [
        {"type": "content_block_start", "index": 0, "content_block": thinking},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "thinking_delta", "thinking": "a"},
        },
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "signature_delta", "signature": PREFIX},
        },
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "b"}},
        {"type": "content_block_stop", "index": 1},
    ]
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def gather(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together from its events, as clients do."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in events:
        kind = event["type"]
        if kind == "message_start":
            message = json.loads(json.dumps(event["message"]))
        elif kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            arguments = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
                block["input"] = json.loads(arguments)
            else:
                (key,) = delta.keys() - {"type"}
                block[key] += delta[key]
        elif kind == "message_delta":
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


@pytest.mark.parametrize("size", [0, 1, 3], ids=["in one piece", "by token", "by three"])
@pytest.mark.parametrize("fields", [{}, THINKS, OMITS], ids=["hidden", "shown", "omitted"])
@pytest.mark.parametrize(
    "text",
    [
        f"{REASONING}I add.\n{CALL}\n{CALL}",
        f"{REASONING}{CALL}",
        f"{REASONING}so be it",
        "so be it",
        "<think>never closed </thi",
        "",
    ],
)
def test_the_events_of_a_stream_add_up_to_the_message(
    tokenizer: Tokenizer, text: str, fields: dict[str, Any], size: int
) -> None:
    made = form(tokenizer, tools=[ADD], stream=True, **fields)
    choice = answer_of(tokenizer, text)
    ids = choice.reply.token_ids.array().tolist()
    events = made.events(0, [4, 5, 6])
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)] if size else []
    sent = [
        event
        for piece in pieces
        for event in events.of([TokenEvent(piece, [-0.5] * len(piece), 7)])
    ]
    sent += events.last(choice)
    assert gather(sent) == made.whole([choice])
    stops = [event["index"] for event in sent if event["type"] == "content_block_stop"]
    starts = [event["index"] for event in sent if event["type"] == "content_block_start"]
    assert starts == stops == list(range(len(starts)))


def test_reasoning_that_the_template_opens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path, "hermes"))
    template = tmp_path / "chat_template.jinja"
    source = template.read_text()
    assert source.count("'<|im_start|>assistant\\n'") == 1
    template.write_text(
        source.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    )
    tokenizer = Tokenizer.load(tmp_path)
    content = form(tokenizer, **THINKS).content(answer_of(tokenizer, "so?\n</think>\n\nyes"))
    assert [block.get("thinking", block.get("text")) for block in content] == ["so?", "yes"]


@pytest.mark.parametrize(
    ("problem", "kind", "message"),
    [
        (HttpError(400, "no"), "invalid_request_error", "no"),
        (HttpError(401, "no"), "authentication_error", "no"),
        (HttpError(403, "no"), "permission_error", "no"),
        (HttpError(404, "no"), "not_found_error", "no"),
        (HttpError(413, "no"), "request_too_large", "no"),
        (HttpError(429, "no"), "rate_limit_error", "no"),
        (HttpError(503, "no"), "api_error", "no"),
        (HttpError(504, "no"), "timeout_error", "no"),
        (
            HttpError(400, "the prompt has 9 tokens", code="context_length_exceeded"),
            "invalid_request_error",
            "prompt is too long: the prompt has 9 tokens",
        ),
    ],
)
def test_errors_have_a_type(problem: HttpError, kind: str, message: str) -> None:
    assert error_body(problem) == {"type": "error", "error": {"type": kind, "message": message}}


def test_templates_that_refuse_a_late_system_message(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert takes_late_system(tokenizer)
    folder = make_tokenizer_folder(tmp_path, "hermes")
    check = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system messages come first') }}{%- endif %}{%- endfor %}"
    )
    template = folder / "chat_template.jinja"
    template.write_text(check + template.read_text())
    assert not takes_late_system(Tokenizer.load(folder))
