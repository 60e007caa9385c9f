"""What the HTTP API takes and refuses, field by field, and what its answers say. No network."""

from __future__ import annotations

import json
from typing import Any

import pytest
from template_models import make_tokenizer_folder

from broker.contract import wire
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody, CompletionBody, parse
from rlearner_text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), "qwen3"))


HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": HELLO, **fields}).encode(), ChatBody)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": None}, "messages", "messages must be given"),
        (
            {"messages": []},
            "messages",
            "messages: [] is not allowed; list should have at least 1 item after validation, not 0",
        ),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages.0.role",
            "messages.0.role: 'robot' is not allowed; input should be",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            "messages.0.content",
            "messages.0.content: 3 is not allowed; input should be",
        ),
        (
            {"messages": [{**HELLO[0], "audio": {"id": "1"}}]},
            "messages.0.audio",
            "messages.0.audio is not supported by this server",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
            "messages.0.content: [{'type': 'image_url'}] is not allowed; only parts of type 'text' are supported, "
            "found 'image_url'",
        ),
        (
            {"temperature": -1},
            "temperature",
            "temperature: -1 is not allowed; input should be greater than or equal to 0",
        ),
        (
            {"temperature": "1"},
            "temperature",
            "temperature: '1' is not allowed; input should be a valid number",
        ),
        ({"top_p": 0}, "top_p", "top_p: 0 is not allowed; input should be greater than 0"),
        ({"n": 0}, "n", "n: 0 is not allowed; input should be greater than or equal to 1"),
        ({"n": True}, "n", "n: True is not allowed; input should be a valid integer"),
        (
            {"max_tokens": 0},
            "max_tokens",
            "max_tokens: 0 is not allowed; input should be greater than 0",
        ),
        (
            {"seed": -1},
            "seed",
            "seed: -1 is not allowed; input should be greater than or equal to 0",
        ),
        ({"stop": ""}, "stop", "stop: '' is not allowed; string should have at least 1 character"),
        ({"stop": [""]}, "stop", "stop: "),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function must be given"),
        (
            {"tool_choice": "always"},
            "tool_choice",
            "tool_choice: 'always' is not allowed; input should be 'none', 'auto' or 'required'",
        ),
        (
            {"response_format": {"type": "grammar"}},
            "response_format.type",
            "response_format.type: 'grammar' is not allowed",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format: "),
        (
            {"logit_bias": {"the": 1}},
            "logit_bias",
            "logit_bias: {'the': 1} is not allowed; keys must be token ids, found 'the'",
        ),
        ({"logit_bias": {"7": 101}}, "logit_bias", "logit_bias: 101 is not allowed"),
        (
            {"messages": [{"role": "assistant"}]},
            "messages.0",
            "messages.0: {'role': 'assistant'} is not allowed; content must be",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[]"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "messages.0.tool_calls.0.function.arguments: '[]' is not allowed; the arguments must be a JSON object",
        ),
        (
            {"presence_penalty": 2.5},
            "presence_penalty",
            "presence_penalty: 2.5 is not allowed; input should be less than or equal to 2",
        ),
        (
            {"top_logprobs": 5},
            "top_logprobs",
            "top_logprobs: 5 is not allowed without logprobs: true",
        ),
        (
            {"top_logprobs": 21, "logprobs": True},
            "top_logprobs",
            "top_logprobs: 21 is not allowed; input should be less than or equal",
        ),
        ({"temprature": 1}, "temprature", "temprature is not supported by this server"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(HttpError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message.startswith(says)
    assert "\n" not in caught.value.message
    assert caught.value.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"messages": ' + b"[" * 100_000]
)
def test_what_is_no_json(raw: bytes) -> None:
    with pytest.raises(HttpError, match="the body is not valid JSON"):
        parse(raw, ChatBody)
    with pytest.raises(HttpError, match="the body must be a JSON object"):
        parse(b"[]", ChatBody)


def test_half_a_character() -> None:
    with pytest.raises(HttpError, match="half of a surrogate pair"):
        chat(messages=[{"role": "user", "content": "\ud800"}])
    assert (
        chat(messages=[{"role": "user", "content": "\U0001f600"}]).messages[0].content
        == "\U0001f600"
    )
    assert chat(messages=[{"role": "user", "content": "a\0"}]).messages[0].content == "a\0"
    called = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}
    ]
    with pytest.raises(HttpError, match="the arguments must be a JSON object"):
        chat(messages=[{"role": "assistant", "tool_calls": called}])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_not_json(number: str) -> None:
    raw = (
        f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{{"type": "function", '
        f'"function": {{"x": {number}}}}}]}}'
    )
    with pytest.raises(
        HttpError,
        match=f"^the body is not valid JSON: (it holds {number}|the number {number} is too large)$",
    ):
        parse(raw.encode(), ChatBody)


def test_what_client_libraries_send_beside_is_let_through() -> None:
    body = chat(
        user="me", metadata={"a": "b"}, presence_penalty=0.0, frequency_penalty=0, logit_bias={}, tools=None,
        response_format={"type": "text"}, stream=None, stop=None, top_p=1, n=1, tool_choice="none",
        parallel_tool_calls=True,
    )  # fmt: skip
    assert (body.stream, body.stops, body.n, body.temperature) == (False, [], 1, 1.0)


def test_messages_become_plain_ones() -> None:
    body = chat(
        messages=[
            {"role": "developer", "content": "be short"},
            {
                "role": "user",
                "name": "me",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ]
    )
    assert [message.plain() for message in body.messages] == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "ab"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], []),
    ],
)
def test_prompts(prompt: Any, prompts: Any) -> None:
    assert parse(json.dumps({"prompt": prompt}).encode(), CompletionBody).prompts() == prompts


@pytest.mark.parametrize("prompt", [[1, "a"], [-1], [2**31], [[1], "a"], 7, [1.5]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(HttpError, match="prompt"):
        parse(json.dumps({"prompt": prompt}).encode(), CompletionBody)


def reply(
    ids: list[int], reason: wire.FinishReason, runs: list[int], hits: int = 0
) -> wire.GenerateReply:
    return wire.GenerateReply(
        request_id="x", server="s", token_ids=wire.column(ids, "<i4"), logprobs=wire.column([-0.5] * len(ids), "<f4"),
        finish_reason=reason,
        version_runs=wire.column(runs, "<i4"), policy_version=7, prefix_hit_tokens=hits,
    )  # fmt: skip


def test_an_answer_holds_text_tokens_and_versions(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    ids = [*tokenizer.encode("so be it"), end]
    prompt = tokenizer.encode_chat(HELLO)
    writer = AnswerWriter(chat(logprobs=True, stop=["it"]), tokenizer, "actor", "1")
    made = writer.whole(
        [AnswerChoice(0, prompt, reply(ids, "stop", [6, 2, 7, len(ids) - 2], hits=3))]
    )
    (choice,) = made["choices"]
    assert (made["object"], made["id"], made["model"], made["policy_version"]) == (
        "chat.completion",
        "chatcmpl-1",
        "actor",
        7,
    )
    assert choice["message"] == {"role": "assistant", "content": "so be "}
    assert (made["prompt_token_ids"], choice["token_ids"], choice["version_runs"]) == (
        prompt,
        ids,
        [[6, 2], [7, len(ids) - 2]],
    )
    assert choice["finish_reason"] == "stop"
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5] * len(ids)
    assert (
        bytes(byte for entry in content for byte in entry["bytes"]).decode() == "so be it<|im_end|>"
    )
    assert made["usage"] == {
        "prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": 3},
    }  # fmt: skip


def test_choices_of_several_prompts(tokenizer: Tokenizer) -> None:
    body = parse(
        json.dumps({"prompt": ["ab", "c"], "n": 2, "logprobs": 0}).encode(), CompletionBody
    )
    prompts = [tokenizer.encode("ab"), tokenizer.encode("c")]
    said = tokenizer.encode("up")
    choices = [
        AnswerChoice(i, prompts[i // 2], reply(said, "length", [7, len(said)])) for i in range(4)
    ]
    made = AnswerWriter(body, tokenizer, "actor", "1").whole(choices)
    assert [(c["index"], c["text"], c["prompt_token_ids"]) for c in made["choices"]] == [
        (i, "up", prompts[i // 2]) for i in range(4)
    ]
    assert made["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[1])
    assert made["usage"]["completion_tokens"] == 4 * len(said)
    assert made["choices"][3]["logprobs"]["token_logprobs"] == [-0.5] * len(said)
    assert made["choices"][3]["logprobs"]["text_offset"][0] == 0
