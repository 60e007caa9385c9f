"""The Responses API: its items become a chat, its answers and events are OpenAI's. No network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.openai.answer_store import AnswerStore
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody, parse
from rlearner_text.openai.response_events import ResponsesFormat
from rlearner_text.openai.responses import ResponsesBody, chat_of, items_of
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.tokenizer import Tokenizer

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("hermes"), "hermes"))


def body_of(**fields: Any) -> ResponsesBody:
    return parse(json.dumps({"input": "hello", **fields}).encode(), ResponsesBody)


def chat(kept: AnswerStore | None = None, **fields: Any) -> ChatBody:
    body = body_of(**fields)
    return chat_of(body, items_of(body, kept or AnswerStore()))


def test_items_become_messages() -> None:
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "add",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    made = chat(
        instructions="be brief",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "what "}, {"type": "input_text",
                "text": "now?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}]},
            call, {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {**call, "call_id": "c3"},
        ],
        tools=[ADD],
        max_output_tokens=7,
        temperature=0.5,
        seed=3,
    )  # fmt: skip
    arguments = {"a": 1}
    assert [one.plain() for one in made.messages] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "what now?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [
            {"id": one, "type": "function", "function": {"name": "add", "arguments": arguments}} for one in ("c1",
                "c2")]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c3", "type": "function", "function": {"name": "add", "arguments": arguments}}]},
    ]  # fmt: skip
    assert made.offered == [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    ]
    assert (made.temperature, made.seed, made.wants_logprobs) == (0.5, 3, False)


def test_earlier_answers_are_found_by_their_ids_until_there_are_too_many() -> None:
    kept = AnswerStore(most_bytes=100)
    asked = {"role": "user", "content": "one"}
    said = {"id": "msg_1", "type": "message", "role": "assistant", "content": "two"}
    kept.add("resp_1", [asked], [said], 60)
    by_id = chat(kept, previous_response_id="resp_1", input="three")
    assert [one.plain()["content"] for one in by_id.messages] == ["one", "two", "three"]
    by_item = chat(
        kept,
        input=[
            asked,
            {"type": "item_reference", "id": "msg_1"},
            {"role": "user", "content": "three"},
        ],
    )
    assert by_item.messages == by_id.messages
    kept.add("resp_2", [], [said | {"id": "msg_2"}], 60)
    assert (kept.item("msg_1"), kept.conversation("resp_1")) == (None, None)
    assert kept.item("msg_2") == said | {"id": "msg_2"}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"input": []}, "input", "input: [] is not allowed; at least one item"),
        ({"input": 3}, "input", "input: 3 is not allowed"),
        (
            {"input": [{"type": "computer_call"}]},
            "input.0.type",
            "input.0.type: 'computer_call' is not allowed; message, function_call",
        ),
        ({"input": [{"role": "user"}]}, "input.0.content", "input.0.content must be given"),
        (
            {"input": [{"role": "robot", "content": ""}]},
            "input.0.role",
            "input.0.role: 'robot' is not allowed",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0",
            "input.0: only text parts are supported",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.id",
            "input.0.id: 'x' is not allowed; this server keeps no answer",
        ),
        (
            {"previous_response_id": "r"},
            "previous_response_id",
            "previous_response_id: 'r' is not allowed; this server keeps no answer",
        ),
        (
            {"tools": [{"type": "computer_use_preview"}]},
            "tools.0.type",
            "tools.0.type: 'computer_use_preview' is not allowed; only tools of type 'function'",
        ),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "tools.0.name must be given"),
        ({"background": True}, "background", "background is not supported by this server"),
        ({"conversation": "c"}, "conversation", "conversation is not supported by this server"),
        ({"n": 2}, "n", "n: 2 is not allowed; input should be 1"),
        ({"top_logprobs": 21}, "top_logprobs", "top_logprobs: 21 is not allowed"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens: 0 is not allowed"),
    ],
)
def test_what_is_not_served_is_one_line(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message


def test_what_client_libraries_send_is_accepted() -> None:
    made = chat(
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"}, user="me",
        store=False, metadata={}, service_tier="auto", parallel_tool_calls=False, truncation="disabled", stream=False,
        tool_choice="none",
    )  # fmt: skip
    assert [one.plain() for one in made.messages] == [{"role": "user", "content": "hello"}]


def reply(ids: list[int], reason: wire.FinishReason) -> wire.GenerateReply:
    return wire.GenerateReply(
        request_id="x", server="s", token_ids=wire.column(ids, "<i4"), logprobs=wire.column([-0.5] * len(ids), "<f4"),
        finish_reason=reason,
        version_runs=wire.column([7, len(ids)], "<i4"), policy_version=7, prefix_hit_tokens=2,
    )  # fmt: skip


def form(tokenizer: Tokenizer, body: ResponsesBody, kept: AnswerStore) -> ResponsesFormat:
    items = items_of(body, kept)
    asked = chat_of(body, items)
    return ResponsesFormat(
        body,
        asked,
        tokenizer,
        lambda name, out: kept.add(name, items, out, 1),
        AnswerWriter(asked, tokenizer, "actor", "1"),
    )


def test_an_answer_is_a_message_and_its_calls(tokenizer: Tokenizer) -> None:
    kept = AnswerStore()
    end = tokenizer.eos_token_ids[0]
    ids = [*tokenizer.encode(f"I add.\n{CALL}"), end]
    made = form(tokenizer, body_of(tools=[ADD], top_logprobs=1), kept).whole(
        [AnswerChoice(0, [4, 5, 6], reply(ids, "stop"))]
    )
    message, call = made["output"]
    assert (made["id"], made["object"], made["status"], made["model"]) == (
        "resp_1",
        "response",
        "completed",
        "actor",
    )
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "I add.")
    assert [entry["logprob"] for entry in message["content"][0]["logprobs"]] == [-0.5] * len(ids)
    assert (call["type"], call["name"], json.loads(call["arguments"]), call["call_id"]) == (
        "function_call",
        "add",
        {"a": 17},
        "call_100000",
    )
    assert made["usage"] == {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": len(ids),
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 3 + len(ids),
    }  # fmt: skip
    assert (
        made["token_ids"],
        made["prompt_token_ids"],
        made["version_runs"],
        made["policy_version"],
    ) == (
        ids,
        [4, 5, 6],
        [[7, len(ids)]],
        7,
    )
    assert kept.conversation("resp_1") == [{"role": "user", "content": "hello"}, message, call]
    cut = form(tokenizer, body_of(), kept).whole(
        [AnswerChoice(0, [4], reply(tokenizer.encode("so"), "length"))]
    )
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert cut["output"][0]["status"] == "incomplete"
    called = form(tokenizer, body_of(tools=[ADD]), kept).whole(
        [AnswerChoice(0, [4], reply(tokenizer.encode(f"so {CALL}"), "length"))]
    )
    # nothing of the call is missing
    assert (called["status"], called["incomplete_details"]) == ("completed", None)
    assert [(item["type"], item["status"]) for item in called["output"]] == [
        ("message", "completed"),
        ("function_call", "completed"),
    ]


def test_of_calls_in_parallel_a_client_may_want_one(tokenizer: Tokenizer) -> None:
    reply_of = reply([*tokenizer.encode(f"{CALL}\n{CALL}"), tokenizer.eos_token_ids[0]], "stop")
    outputs = [
        form(tokenizer, body_of(tools=[ADD], parallel_tool_calls=parallel), AnswerStore()).whole(
            [AnswerChoice(0, [4], reply_of)]
        )["output"]
        for parallel in (True, False)
    ]
    assert [[item["type"] for item in output] for output in outputs] == [
        ["function_call"] * 2,
        ["function_call"],
    ]


@pytest.mark.parametrize("told", [True, False], ids=["as it is sampled", "in one piece"])
@pytest.mark.parametrize(
    "said",
    [f"I add.\n{CALL}", CALL, "so be it", ""],
    ids=["words and a call", "a call", "words", "nothing"],
)
def test_the_events_of_a_stream_add_up_to_the_answer(
    tokenizer: Tokenizer, said: str, told: bool
) -> None:
    ids = [*tokenizer.encode(said), tokenizer.eos_token_ids[0]]
    made = form(tokenizer, body_of(tools=[ADD], stream=True), AnswerStore())
    events = made.events(0, [4, 5])
    pieces = [TokenEvent([one], [-0.5], 7) for one in ids] if told else []
    sent = [event for piece in pieces for event in events.of([piece])] + events.last(
        AnswerChoice(0, [4, 5], reply(ids, "stop"))
    )
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    kinds = [event["type"] for event in sent]
    assert (kinds[:2], kinds[-1]) == (
        ["response.created", "response.in_progress"],
        "response.completed",
    )
    whole = sent[-1]["response"]
    assert whole == made.whole([AnswerChoice(0, [4, 5], reply(ids, "stop"))])
    assert [
        event["item"] for event in sent if event["type"] == "response.output_item.done"
    ] == whole["output"]
    added = [event for event in sent if event["type"] == "response.output_item.added"]
    assert [(event["output_index"], event["item"]["id"]) for event in added] == [
        (n, one["id"]) for n, one in enumerate(whole["output"])
    ]
    words = "".join(
        event["delta"] for event in sent if event["type"] == "response.output_text.delta"
    )
    assert words == "".join(
        one["content"][0]["text"] for one in whole["output"] if one["type"] == "message"
    )
    arguments = [
        event["delta"]
        for event in sent
        if event["type"] == "response.function_call_arguments.delta"
    ]
    assert arguments == [
        one["arguments"] for one in whole["output"] if one["type"] == "function_call"
    ]


def test_a_folder_without_calls_in_its_template_takes_words(tmp_path: Path) -> None:
    plain = Tokenizer.load(make_tokenizer_folder(tmp_path, "plain"))
    ids = plain.encode("yes")
    assert (
        form(plain, body_of(), AnswerStore()).whole([AnswerChoice(0, [4], reply(ids, "length"))])[
            "output"
        ][0]["content"][0]["text"]
        == "yes"
    )
