"""The OpenAI-compatible API: answers, streams, errors, disconnects, keys; in this process, and as a
real one on a real broker.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_kit import KEY, Api, api
from waits import LONG_S

from broker.contract import wire
from broker.errors import ConfigError, UserError
from broker.jetstream.bus import Bus
from broker.settings import runspec
from rewardhub.rewards.base import NoScore, Sample
from rewardhub.rewards.judge import JudgeArgs, JudgeReward
from rlearner_text.config import TinyModel
from rlearner_text.openai import api_keys
from rlearner_text.openai.backends import ServedModel
from rlearner_text.tiny import _write_tokenizer
from rollout.config import RolloutSection
from rollout.http import prepare_http

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("http")
    _write_tokenizer(folder, TinyModel())  # all that engine random needs
    return str(folder)


@pytest.fixture
async def served(model_path: str) -> AsyncIterator[Api]:
    async with api(model_path) as made:
        yield made


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """What a stream brought; the end marker as it is."""
    lines = [line.removeprefix("data: ") for line in (await response.text()).split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_conversation_is_rendered_and_answered_with_tokens_and_versions(
    served: Api,
) -> None:
    ask = {
        "model": "actor",
        "messages": HELLO,
        "seed": 7,
        "max_completion_tokens": 9,
        "ignore_eos": True,
        "logprobs": True,
    }
    answer = await served.post("/chat/completions", ask)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == served.tokenizer.encode_chat(HELLO)
    assert (choice["finish_reason"], len(choice["token_ids"]), choice["version_runs"]) == (
        "length",
        9,
        [[0, 9]],
    )
    assert choice["message"] == {
        "role": "assistant",
        "content": served.tokenizer.decode(choice["token_ids"]),
    }
    assert answer["policy_version"] == 0
    assert choice["logprobs"]["content"][3]["logprob"] == pytest.approx(
        -math.log(served.tokenizer.vocab_size), rel=1e-6
    )
    again = await served.post("/chat/completions", ask)
    assert again["choices"][0]["token_ids"] == choice["token_ids"]
    bare = await served.post(
        "/chat/completions", {"messages": HELLO, "max_tokens": 3, "return_token_ids": False}
    )
    assert "prompt_token_ids" not in bare
    assert "token_ids" not in bare["choices"][0]


async def test_prompts_as_text_and_as_tokens_with_several_choices_each(served: Api) -> None:
    ids = served.tokenizer.encode("the goal")
    both = [
        await served.post(
            "/completions",
            {"prompt": prompt, "n": 3, "seed": 5, "ignore_eos": True, "max_tokens": 4},
        )
        for prompt in ("the goal", ids)
    ]
    outputs = [[choice["token_ids"] for choice in answer["choices"]] for answer in both]
    assert outputs[0] == outputs[1]
    assert len({tuple(one) for one in outputs[0]}) == 3  # seed, seed + 1, seed + 2
    assert [choice["index"] for choice in both[0]["choices"]] == [0, 1, 2]
    assert both[0]["choices"][2]["prompt_token_ids"] == ids
    assert both[0]["usage"]["prompt_tokens"] == len(ids)
    many = await served.post(
        "/completions", {"prompt": [ids, [5, 6]], "max_tokens": 1, "ignore_eos": True}
    )
    assert [choice["prompt_token_ids"] for choice in many["choices"]] == [ids, [5, 6]]
    assert (
        len(
            (await served.post("/completions", {"prompt": ids, "ignore_eos": True}))["choices"][0][
                "token_ids"
            ]
        )
        == 16
    )


async def test_stop_strings_are_kept_as_tokens_and_cut_as_text(served: Api) -> None:
    ask = {"prompt": [5, 6], "seed": 1, "max_tokens": 30, "ignore_eos": True}
    free = (await served.post("/completions", ask))["choices"][0]
    stop = served.tokenizer.decode(free["token_ids"][6:8], skip_special_tokens=False)
    cut = (await served.post("/completions", {**ask, "stop": stop}))["choices"][0]
    assert cut["finish_reason"] == "stop"
    assert free["token_ids"][: len(cut["token_ids"])] == cut["token_ids"]
    assert stop in served.tokenizer.decode(cut["token_ids"], skip_special_tokens=False)
    assert stop not in cut["text"]


async def test_a_stream_brings_what_the_whole_answer_holds(served: Api) -> None:
    ask = {"messages": HELLO, "seed": 3, "n": 2, "max_tokens": 6, "ignore_eos": True}
    whole = await served.post("/chat/completions", ask)
    body = {**ask, "stream": True, "stream_options": {"include_usage": True}}
    async with served.client.post(served.address + "/chat/completions", json=body) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        *chunks, usage, done = await events(response)
    assert done == "[DONE]"
    assert (usage["usage"], usage["choices"]) == (whole["usage"], [])
    for choice in whole["choices"]:
        first, last = [
            one["choices"][0] for one in chunks if one["choices"][0]["index"] == choice["index"]
        ]
        assert first["delta"] == choice["message"]
        assert (first["token_ids"], first["version_runs"]) == (
            choice["token_ids"],
            choice["version_runs"],
        )
        assert (first["finish_reason"], last["finish_reason"], last["delta"]) == (
            None,
            "length",
            {},
        )
    assert {one["object"] for one in chunks} == {"chat.completion.chunk"}


async def test_models_and_health(served: Api) -> None:
    async with served.client.get(served.address + "/models") as response:
        (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"], model["policy_version"]) == ("actor", 128, 0)
    async with (
        aiohttp.ClientSession() as nobody,
        nobody.get(served.address.removesuffix("/v1") + "/health") as response,
    ):
        assert (response.status, await response.json()) == (
            200,
            {"status": "serving", "policy_version": 0},
        )


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (
            "/chat/completions",
            {"model": "gpt-9", "messages": HELLO},
            404,
            "there is no model 'gpt-9', only 'actor'",
        ),
        (
            "/chat/completions",
            {"messages": HELLO, "top_p": 2},
            400,
            "top_p: 2 is not allowed; input should be less than or equal to 1",
        ),
        ("/completions", {"prompt": []}, 400, "the prompt is empty"),
        (
            "/completions",
            {"prompt": [5] * 128},
            400,
            "the prompt has 128 tokens and leaves no room to generate in 128",
        ),
        (
            "/completions",
            {"prompt": ["a"] * 9, "n": 99},
            400,
            "9 prompts with n=99: at most 256 choices",
        ),
        ("/completions", {"prompt": "a" * 9_000_000}, 413, "the body is larger than 8388608 bytes"),
        ("/embeddings", {}, 404, "POST /v1/embeddings: not found"),
        ("/models", {}, 405, "POST /v1/models: method not allowed"),
    ],
    ids=["model", "value", "empty", "too long", "too many", "too large", "path", "method"],
)
async def test_bad_input_is_an_error_object(
    served: Api, path: str, body: Any, status: int, says: str
) -> None:
    answer = await served.post(path, body, status)
    assert answer["error"]["message"] == says
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    await served.post("/completions", {"prompt": "a"})


@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer wrong", "Basic a-key-of-these-tests", "Bearer ä"]
)
async def test_without_the_key_nothing(served: Api, header: str | None) -> None:
    async with aiohttp.ClientSession(
        headers={"Authorization": header} if header else {}
    ) as stranger:
        for path in ("/chat/completions", "/nowhere"):
            async with stranger.post(served.address + path, data=b"{") as response:
                assert response.status == 401
                assert (await response.json())["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n",
    ],
    ids=["tls", "version", "length", "key"],
)
async def test_what_is_no_http_costs_a_line(
    served: Api, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = served.address.removeprefix("http://").removesuffix("/v1").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), LONG_S)
    writer.close()
    assert answer.split(b" ")[1] in (b"400", b"401", b"505")
    assert "Traceback" not in caplog.text
    assert len(caplog.text.splitlines()) <= 1
    await served.post("/completions", {"prompt": "a"})


async def test_a_client_that_leaves_aborts_its_request(model_path: str) -> None:
    async with api(model_path, delay_s=0.2) as served:
        asking = asyncio.create_task(
            served.post(
                "/completions", {"prompt": "a", "n": 3, "max_tokens": 100, "ignore_eos": True}
            )
        )
        async with asyncio.timeout(LONG_S):
            while served.engine.stats().running < 3:  # noqa: ASYNC110 - engines tell their numbers, not when they change
                await asyncio.sleep(0.01)
            asking.cancel()
            while served.engine.stats().running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_deadlines_drains_and_a_broken_engine(model_path: str) -> None:
    async with api(model_path, delay_s=0.5) as served:
        ask = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
        partial = (await served.post("/completions", ask | {"deadline_s": 0.6}))["choices"][0]
        assert (partial["finish_reason"], 0 < len(partial["token_ids"]) < 100) == ("deadline", True)
        late = await served.post("/completions", ask | {"deadline_s": 0.01}, 504)
        assert late["error"]["message"] == "nothing was sampled within deadline_s=0.01"
        await served.service.drain()
        await served.post("/completions", ask, 503)
        async with served.client.post(
            served.address + "/completions", json=ask | {"stream": True}
        ) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
    async with api(model_path) as served:
        await served.engine.close()
        assert (await served.post("/completions", ask, 500))["error"][
            "message"
        ] == "the engine failed: the engine has stopped"


async def test_a_judge_asks_it(served: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    args = {
        "base_url": served.address,
        "api_key": {"env": "JUDGE_KEY"},
        "template": "{response}",
        "max_tokens": 4,
        "asks_again": 1,
    }
    sample = Sample(
        domain="d", task_index=1, prompt="", response="hello", reference="", reward=0.0, reward_parts={},
        success=False, end="terminated",
        num_turns=1, num_tokens=1, metrics={},
    )  # fmt: skip
    judge = JudgeReward(JudgeArgs.model_validate(args))
    await judge.start()
    with pytest.raises(
        NoScore, match=r"^domain 'd', task 1: the judge gave no score from 0 to 10 in 2 answers"
    ):
        await judge.score(sample)  # an engine without a model says what chance says
    await judge.client.close()
    assert served.engine.stats().finished


async def test_a_port_that_is_taken(
    served: Api, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(api_keys.VARIABLE, "long-enough-to-be-a-key")
    port = int(served.address.split(":")[2].removesuffix("/v1"))
    with pytest.raises(
        ConfigError,
        match=rf"^rollout\.http_port: {port} is not allowed; the port is not available \(.*in use.*\)",
    ):
        await prepare_http(
            served.service.handle,
            ServedModel("actor", model_path, 64, lambda: "serving", lambda: 0),
            RolloutSection(),
            bind="127.0.0.1",
            port=port,
            trust_remote_code=False,
        )


def test_a_key_is_made_once_and_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(api_keys.VARIABLE, raising=False)
    key, where = api_keys.find_key()
    assert (where, api_keys.find_key()) == (str(tmp_path / "rlearner/api_key"), (key, where))
    assert (len(key) > 40, stat.S_IMODE(Path(where).stat().st_mode)) == (True, 0o600)
    assert [file.name for file in (tmp_path / "rlearner").iterdir()] == ["api_key"]
    Path(where).chmod(0o644)
    with pytest.raises(UserError, match="may be read by others"):
        api_keys.find_key()
    monkeypatch.setenv(api_keys.VARIABLE, "short")
    with pytest.raises(UserError, match="the API key in RL_API_KEY is not allowed; at least 16"):
        api_keys.find_key()
    monkeypatch.setenv(api_keys.VARIABLE, "long-enough-to-be-a-key")
    assert api_keys.find_key() == ("long-enough-to-be-a-key", "RL_API_KEY")


async def test_a_server_process_offers_it_beside_the_stream(
    bus: Bus, broker_url: str, model_path: str, tmp_path: Path
) -> None:
    config = runspec.validate({"rollout": {"max_context_tokens": 128}, "domains": {"lake": {"env": "frozenlake",
        "max_context_tokens": 64,
                               "sampling": {"max_tokens": 4}}}})  # fmt: skip
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=model_path
    )
    await runspec.publish_runspec(bus, spec)
    command = [sys.executable, "-m", "rollout.cli", "--broker", broker_url, "--run", bus.run, "--gpus", "cpu",
        "--http=0",
               "--engine", "random", "--policy", "random", "engine_args.choices=[left, up]"]  # fmt: skip
    env = {
        **os.environ,
        "XDG_CONFIG_HOME": str(tmp_path),
        "RL_API_KEY": "",
        "RL_RUN": "",
        "RL_BROKER": "",
    }
    process = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env
    )
    assert process.stdout is not None
    said = ""
    try:
        async with asyncio.timeout(LONG_S):
            while not (found := re.search(r"API at (\S+), model random, API key in (\S+)", said)):
                line = (await process.stdout.readline()).decode()
                assert line, said
                said += line
        key = (await asyncio.to_thread(Path(found[2]).read_text)).strip()
        sent = {
            "url": found[1] + "/chat/completions",
            "json": {"model": "random", "messages": HELLO},
        }
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client,
            client.post(**sent) as response,
        ):
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] in ("left", "up")
        assert answer["choices"][0]["finish_reason"] == "stop"
    finally:
        process.send_signal(signal.SIGTERM)
        said += (await process.stdout.read()).decode()
        assert await process.wait() == 0, said
    assert "Traceback" not in said
    assert key not in said
