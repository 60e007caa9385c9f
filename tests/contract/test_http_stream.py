"""Streams and likeliest tokens of the OpenAI-compatible API: against transformers, by OpenAI's own
client, with clients slow or gone.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from http_kit import KEY, Api, api
from waits import LONG_S, until

from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose distribution is far from uniform."""
    folder = build_tiny(tmp_path_factory.mktemp("stream") / "model", TinyModel())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.dim() > 1 else None
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture
async def served(model_path: str) -> AsyncIterator[Api]:
    async with api(model_path, engine="hf") as made:
        yield made


async def events(served: Api, path: str, body: Any) -> list[Any]:
    """All chunks of a stream."""
    async with served.client.post(served.address + path, json=body | {"stream": True}) as response:
        assert response.status == 200, await response.text()
        lines = [
            line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line
        ]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def table(model_path: str, prompt: list[int], output: list[int]) -> torch.Tensor:
    """Logits of each output token's place, from one plain forward."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(model_path), dtype=torch.float32
    ).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt + output])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


async def test_openais_client_streams_what_it_gets_whole(served: Api) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is in the extra agents")
    client = openai.AsyncOpenAI(base_url=served.address, api_key=KEY, max_retries=0)
    ask: dict[str, Any] = {
        "model": "actor",
        "messages": HELLO,
        "temperature": 0,
        "max_completion_tokens": 40,
        "logprobs": True,
    }
    ask |= {"top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    whole = await client.chat.completions.create(**ask)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}
        )
    ]
    await client.close()
    (choice,) = whole.choices
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(part.delta.content or "" for part in parts) == choice.message.content
    assert [
        one for part in parts[:-1] for one in part.model_extra["token_ids"]
    ] == choice.model_extra["token_ids"]
    told = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in told] == [entry.token for entry in choice.logprobs.content]
    for one, other in zip(told, choice.logprobs.content, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [(best.token, best.bytes) for best in one.top_logprobs] == [
            (best.token, best.bytes) for best in other.top_logprobs
        ]
        assert [best.logprob for best in one.top_logprobs] == pytest.approx(
            [best.logprob for best in other.top_logprobs], abs=1e-4
        )
    runs = [run for part in parts[:-1] for run in part.model_extra["version_runs"]]
    assert ({version for version, _ in runs}, sum(count for _, count in runs)) == ({0}, 40)
    assert (parts[0].delta.role, parts[-1].finish_reason) == ("assistant", "length")
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.prompt_tokens) == (
        40,
        whole.usage.prompt_tokens,
    )
    assert len({chunk.id for chunk in chunks}) == 1


async def test_openais_client_streams_a_response_and_goes_on_from_it(served: Api) -> None:
    openai = pytest.importorskip("openai", reason="OpenAI's client is in the extra agents")
    client = openai.AsyncOpenAI(base_url=served.address, api_key=KEY, max_retries=0)
    ask: dict[str, Any] = {
        "model": "actor",
        "input": "hello",
        "instructions": "be brief",
        "temperature": 0,
        "max_output_tokens": 20,
    }
    ask |= {
        "extra_body": {"ignore_eos": True},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = await client.responses.create(**ask)
    events = [event async for event in await client.responses.create(**ask, stream=True)]
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert whole.model_extra["prompt_token_ids"] == served.tokenizer.encode_chat(chat)
    assert (whole.status, whole.incomplete_details.reason, whole.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        20,
    )
    assert whole.output_text == served.tokenizer.decode(whole.model_extra["token_ids"])
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    # as they are sampled
    assert len([event for event in events if event.type == "response.output_text.delta"]) > 10
    last = events[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", whole.output_text)
    assert last.response.model_extra["token_ids"] == whole.model_extra["token_ids"]
    entries = whole.output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in entries] == [2] * 20
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)  # greedy
    more = await client.responses.create(
        model="actor", input="more", previous_response_id=last.response.id, max_output_tokens=3
    )
    await client.close()
    chat = [
        *chat[1:],
        {"role": "assistant", "content": whole.output_text},
        {"role": "user", "content": "more"},
    ]
    assert more.model_extra["prompt_token_ids"] == served.tokenizer.encode_chat(chat)


async def test_the_likeliest_tokens_are_those_of_the_model(served: Api, model_path: str) -> None:
    prompt = served.tokenizer.encode("the goal")
    ask = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "logprobs": 4, "seed": 3}
    for temperature in (0, 0.7):
        (choice,) = (await served.post("/completions", ask | {"temperature": temperature}))[
            "choices"
        ]
        rows = (table(model_path, prompt, choice["token_ids"]) / (temperature or 1)).log_softmax(-1)
        for row, told in zip(rows, choice["logprobs"]["top_logprobs"], strict=True):
            values, ids = row.topk(4)
            assert list(told) == [
                served.tokenizer.decode([one], skip_special_tokens=False)
                for one in reversed(ids.tolist())
            ]
            assert list(told.values()) == pytest.approx(list(reversed(values.tolist())), abs=1e-3)


async def test_tokens_that_are_cut_off_are_not_among_the_likeliest(
    served: Api, model_path: str
) -> None:
    prompt = served.tokenizer.encode("the goal")
    ask = {
        "prompt": prompt,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 5,
        "seed": 3,
        "top_k": 3,
        "temperature": 2.0,
        "n": 2,
    }
    for choice in (await served.post("/completions", ask))["choices"]:
        rows = table(model_path, prompt, choice["token_ids"]) / 2
        for row, told, logprob in zip(
            rows,
            *(choice["logprobs"][key] for key in ("top_logprobs", "token_logprobs")),
            strict=True,
        ):
            assert sorted(told.values()) == pytest.approx(
                sorted(row.topk(3).values.log_softmax(-1).tolist()), abs=1e-3
            )
            assert min(abs(value - logprob) for value in told.values()) < 1e-5


async def test_several_choices_stream_side_by_side(served: Api) -> None:
    ask = {
        "prompt": ["the goal", "a"],
        "n": 2,
        "seed": 5,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop": "x",
        "logprobs": 0,
    }
    whole = await served.post("/completions", ask)
    parts = [chunk["choices"][0] for chunk in await events(served, "/completions", ask)]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [one for part in mine[:-1] for one in part["token_ids"]] == choice["token_ids"]
        told = [one for part in mine[:-1] for one in part["logprobs"]["token_logprobs"]]
        assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        assert (mine[0]["prompt_token_ids"], mine[-1]["finish_reason"]) == (
            choice["prompt_token_ids"],
            choice["finish_reason"],
        )


async def test_new_weights_show_in_the_stream(served: Api) -> None:
    ask = {"prompt": [5, 6], "max_tokens": 110, "ignore_eos": True, "stream": True}
    runs: list[list[int]] = []
    async with served.client.post(served.address + "/completions", json=ask) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                runs += json.loads(line[6:])["choices"][0].get("version_runs", [])
                if len(runs) == 1:
                    await served.engine.adopt(7)
    versions = [version for version, _ in runs]
    assert versions == sorted(versions)
    assert (versions[0], versions[-1], sum(count for _, count in runs)) == (
        0,
        served.engine.policy_version,
        110,
    )


async def test_an_engine_that_knows_no_others_says_so(model_path: str) -> None:
    async with api(model_path) as served:
        said = "is not supported by this server; its engine returns the logprobs of sampled tokens only"
        ask = {"messages": HELLO, "logprobs": True, "max_tokens": 3}
        answer = await served.post("/chat/completions", ask | {"top_logprobs": 2}, 400)
        assert (answer["error"]["message"], answer["error"]["param"]) == (
            f"top_logprobs: 2 {said}",
            "top_logprobs",
        )
        answer = await served.post(
            "/completions", {"prompt": "a", "logprobs": 5, "stream": True}, 400
        )
        assert (answer["error"]["message"], answer["error"]["param"]) == (
            f"logprobs: 5 {said}",
            "logprobs",
        )
        (choice,) = (await served.post("/completions", {"prompt": "a", "logprobs": 1}))["choices"]
        assert choice["logprobs"]["top_logprobs"] is None
        assert (await served.post("/chat/completions", ask | {"top_logprobs": 0}))["choices"][0][
            "logprobs"
        ]["content"]


async def test_tokens_come_as_they_are_sampled_and_a_client_that_leaves_ends_it(
    model_path: str,
) -> None:
    async with api(model_path, delay_s=0.05) as served:
        ask = {"prompt": "a", "max_tokens": 120, "ignore_eos": True, "stream": True}
        async with (
            asyncio.timeout(LONG_S),
            served.client.post(served.address + "/completions", json=ask) as response,
        ):
            lines: list[Any] = []
            while len(lines) < 3:
                if (line := await response.content.readline()).startswith(b"data: "):
                    lines.append(json.loads(line[6:])["choices"][0])
            assert served.engine.stats().running == 1  # it goes on
            assert sum(len(line["token_ids"]) for line in lines) < 120
        await until(lambda: served.engine.stats().running == 0)


async def test_a_slow_client_does_not_slow_the_engine(model_path: str) -> None:
    async with api(model_path, delay_s=0.005) as served:
        for listener in cast(Any, served.server)._listener.sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
        body = json.dumps(
            {
                "prompt": "a",
                "n": 16,
                "max_tokens": 120,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 0,
            }
        ).encode()
        host, port = served.address.removeprefix("http://").removesuffix("/v1").split(":")
        with socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(slow, (host, int(port)))
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: "
                f"{len(body)}\r\n\r\n"
            )
            await loop.sock_sendall(slow, head.encode() + body)
            # and not a byte was read
            await until(lambda: served.engine.stats().finished.get("length") == 16)
            other = await served.post(
                "/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True}
            )
            assert other["usage"]["completion_tokens"] == 3
            read = b""
            async with asyncio.timeout(LONG_S):
                while not read.endswith(b"0\r\n\r\n"):
                    read += await loop.sock_recv(slow, 1 << 20)
        told = [
            json.loads(line[6:])["choices"][0]
            for line in read.splitlines()
            if line.startswith(b"data: {")
        ]
        for index in range(16):
            assert (
                sum(len(one.get("token_ids", ())) for one in told if one["index"] == index) == 120
            )
        assert [one["finish_reason"] for one in told].count("length") == 16
        assert len(told) < 16 * 60  # what was kept came in few chunks
