"""The engine openai against endpoints that return text alone, fail, throttle, or are not there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from http_kit import KEY, Api, api

from broker.contract import wire
from broker.errors import ConfigError, UserError
from rlearner_text.config import TinyModel
from rlearner_text.openai.client import backoff_s
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer
from rollout.checks import check_engine
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.openai import OpenAIEngine
from rollout.engines.random import end_token

CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("openai")
    _write_tokenizer(folder, TinyModel())
    return str(folder)


class Script:
    """An endpoint that answers what it is told to, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []  # type: tuple[list[Any], list[Any]]
        self.headers: list[Any] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers.get("Authorization"))
        if request.method == "GET":
            return web.json_response({"data": [{"id": "m1"}]})
        self.asked.append((request.path, await request.json()))
        status, body, *headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(body, status=status, headers=headers[0] if headers else {})


@pytest.fixture
async def scripted() -> AsyncIterator[Callable[..., Any]]:
    runners = []

    async def make(*answers: Any) -> Script:
        script, app = Script(*answers), web.Application()
        app.router.add_route("*", "/v1/{rest:.*}", script.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        script.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        runners.append(runner)
        return script

    yield make
    for runner in runners:
        await runner.cleanup()


def chat(text: str, reason: str = "stop", **extra: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": reason, **extra}]}


async def ask(
    model_path: str,
    url: str,
    prompt: list[int],
    *,
    deadline_s: float = 20.0,
    args: Any = None,
    **sampling: Any,
) -> GenerationOutput:
    """One request through an engine of its own."""
    settings = {"base_url": url, "backoff_s": 0.01, **(args or {})}
    section = RolloutSection(
        engine="openai", policy="judge", max_context_tokens=256, engine_args=settings
    )
    engine = OpenAIEngine(EngineConfig(model_path, section))
    await engine.start()
    try:
        return await engine.generate(
            wire.GenerateRequest(
                request_id="r", conversation_id="c", token_ids=wire.column(prompt, "<i4"), deadline_s=deadline_s,
                sampling=wire.SamplingParams(**{"max_tokens": 20, **sampling}),
            )
        )  # fmt: skip
    finally:
        await engine.close()


async def test_a_chat_endpoint_gets_messages_and_its_text_becomes_tokens(
    model_path: str, scripted: Any
) -> None:
    tokenizer, script = Tokenizer.load(model_path), await scripted(chat("go left"))
    output = await ask(model_path, script.url, tokenizer.encode_chat(CHAT), temperature=0.5, seed=3,
        stop_token_ids=[1], args={
        "max_tokens_field": "max_completion_tokens", "extra_body": {"top_p": None,
            "reasoning_effort": "low"}})  # fmt: skip
    ids = [*tokenizer.encode("go left"), end_token(tokenizer, model_path)]
    assert output == GenerationOutput(ids, [0.0] * len(ids), [(0, len(ids))], "stop")
    expected = {
        "model": "m1",
        "messages": CHAT,
        "max_completion_tokens": 20,
        "temperature": 0.5,
        "seed": 3,
        "reasoning_effort": "low",
    }
    assert script.asked == [("/v1/chat/completions", expected)]


async def test_waiting_requests_are_forwarded_by_step_and_priority_one_after_another(
    model_path: str, scripted: Any
) -> None:
    script = await scripted(chat("yes"))
    settings = {"base_url": script.url, "api": "chat", "max_concurrency": 1}
    section = RolloutSection(
        engine="openai", policy="judge", max_context_tokens=256, engine_args=settings
    )
    engine = OpenAIEngine(EngineConfig(model_path, section))
    prompt = Tokenizer.load(model_path).encode_chat(CHAT)
    await engine.start()
    try:
        working = []
        for tokens, step, priority in ((1, 9, 0), (2, 8, 0), (3, 7, 0), (4, 7, 0), (5, 9, 1)):
            request = wire.GenerateRequest(
                request_id=f"r{tokens}", conversation_id="c", token_ids=wire.column(prompt, "<i4"), deadline_s=60.0,
                sampling=wire.SamplingParams(max_tokens=tokens), step=step, priority=priority,
            )  # fmt: skip
            working.append(asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(0)
        assert (engine.stats().running, engine.stats().waiting) == (1, 4)
        engine.abort("r3")
        await asyncio.gather(*working)
    finally:
        await engine.close()
    # the first had the slot; a priority, then the earlier step, then the longer answer
    assert [body["max_tokens"] for _, body in script.asked] == [1, 5, 4, 2]
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_text_that_is_longer_here_is_cut(model_path: str, scripted: Any) -> None:
    tokenizer, script = (
        Tokenizer.load(model_path),
        await scripted(chat("a rather long answer to that", "length")),
    )
    output = await ask(model_path, script.url, tokenizer.encode_chat(CHAT), max_tokens=4)
    assert (list(output.token_ids), output.finish_reason) == (
        tokenizer.encode("a rather long answer to that")[:4],
        "length",
    )


async def test_completions_get_the_whole_prompt_as_text(model_path: str, scripted: Any) -> None:
    tokenizer = Tokenizer.load(model_path)
    script = await scripted((200, {"choices": [{"text": "up", "finish_reason": "length"}]}))
    output = await ask(
        model_path,
        script.url,
        tokenizer.encode_chat(CHAT),
        args={"api": "completions", "model": "mine"},
        stop=["x"],
    )
    assert list(output.token_ids) == tokenizer.encode("up")
    ((path, body),) = script.asked
    assert (path, body["prompt"], body["model"], body["stop"]) == (
        "/v1/completions",
        tokenizer.render_chat(CHAT),
        "mine",
        ["x"],
    )


@pytest.fixture
async def served(model_path: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Api]:
    monkeypatch.setenv("MY_KEY", KEY)
    async with api(model_path, max_context_tokens=256, choices=["left", "up"]) as made:
        yield made


@pytest.mark.parametrize("kind", ["chat", "completions"])
@pytest.mark.parametrize("token_ids", [True, False])
async def test_our_own_server_gives_the_same_by_every_way(
    served: Api, model_path: str, kind: str, token_ids: bool
) -> None:
    args = {"api": kind, "token_ids": token_ids, "api_key": {"env": "MY_KEY"}}
    output = await ask(
        model_path, served.address, served.tokenizer.encode_chat(CHAT), seed=4, args=args
    )
    direct = await served.engine.generate(
        wire.GenerateRequest(request_id="d", conversation_id="d",
            token_ids=wire.column(served.tokenizer.encode_chat(CHAT), "<i4"),
                             sampling=wire.SamplingParams(max_tokens=20, seed=4))
    )  # fmt: skip
    assert list(output.token_ids) == list(direct.token_ids)
    assert list(output.logprobs) == (
        pytest.approx(list(direct.logprobs)) if token_ids else [0.0] * len(direct.token_ids)
    )


async def test_throttled_and_broken_answers_are_asked_for_again(
    model_path: str, scripted: Any
) -> None:
    script = await scripted(
        (429, {}, {"Retry-After": "0.3"}), (503, {"error": "busy"}), (200, []), chat("ok")
    )
    began = asyncio.get_running_loop().time()
    output = await ask(model_path, script.url, Tokenizer.load(model_path).encode_chat(CHAT))
    assert (output.finish_reason, len(script.asked)) == ("stop", 4)
    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_what_cannot_be_mended_by_asking_again(model_path: str, scripted: Any) -> None:
    prompt = Tokenizer.load(model_path).encode_chat(CHAT)
    refusing = await scripted((400, {"error": {"message": "top_k is\nunknown"}}))
    assert await ask(model_path, refusing.url, prompt, top_k=4) == GenerationOutput(
        error="the endpoint answered 400: top_k is unknown"
    )
    assert (len(refusing.asked), refusing.asked[0][1]["top_k"]) == (1, 4)
    filtered = await scripted(chat("", "content_filter"))
    assert (
        await ask(model_path, filtered.url, prompt)
    ).error == "the endpoint ended the output with finish_reason 'content_filter'"
    with pytest.raises(RuntimeError, match="the endpoint answered 402: pay first"):
        await ask(model_path, (await scripted((402, {"message": "pay first"}))).url, prompt)
    with pytest.raises(
        RuntimeError, match=r"chat/completions gave no answer in 3 tries: 500: down"
    ):
        await ask(
            model_path, (await scripted((500, {"error": "down"}))).url, prompt, args={"retries": 2}
        )
    with pytest.raises(
        RuntimeError, match=r"returns no token_ids; set rollout\.engine_args\.token_ids=false"
    ):
        await ask(model_path, (await scripted(chat("x"))).url, prompt, args={"token_ids": True})
    text = await ask(model_path, filtered.url, [5, 6, 7])
    assert (
        text.error
        == "the context is not a conversation of the model's chat template; use engine_args.api=completions"
    )


async def test_waiting_to_ask_again_ends_at_the_deadline(model_path: str, scripted: Any) -> None:
    script = await scripted((429, {}, {"Retry-After": "60"}))
    output = await ask(
        model_path, script.url, Tokenizer.load(model_path).encode_chat(CHAT), deadline_s=0.2
    )
    assert output == GenerationOutput(finish_reason="deadline")


async def test_the_wrong_key_no_endpoint_and_no_model_are_one_line(
    served: Api, model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(
        UserError,
        match=r"does not accept the key in the environment variable OPENAI_API_KEY: the endpoint answered 401: the API",
    ):
        await ask(model_path, served.address, [5])
    with pytest.raises(
        UserError,
        match=r"^http://127\.0\.0\.1:1/v1/models gave no answer in 2 tries: Cannot connect to host",
    ):
        await ask(model_path, "http://127.0.0.1:1/v1", [5], args={"retries": 1})
    with pytest.raises(
        ConfigError,
        match=r"^rollout\.engine_args\.model: None is not allowed; .* lists no models; name one",
    ):
        await ask(model_path, served.address + "/nothing", [5], args={"api_key": {"env": "MY_KEY"}})


def test_it_never_is_the_policy_that_is_trained(model_path: str) -> None:
    section = RolloutSection(engine="openai", engine_args={"base_url": "http://127.0.0.1:1/v1"})
    with pytest.raises(
        ConfigError,
        match=r"^rollout\.policy: 'actor' is not allowed; engine openai does not follow the learner's weights",
    ):
        OpenAIEngine(EngineConfig(model_path, section))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://me:secret@host/v1"])
def test_a_base_url_that_is_none(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.engine_args\.base_url: .* expected http://host:port/v1"
    ):
        check_engine(RolloutSection(engine="openai", engine_args={"base_url": url}))


@pytest.mark.parametrize(
    ("attempt", "headers", "chance", "seconds"),
    [
        (1, {}, 0.0, 0.25),
        (3, {}, 0.5, 1.5),
        (20, {}, 0.0, 15.0),
        (1, {"Retry-After": "7"}, 0.0, 7.0),
        (
            1,
            {
                "Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT",
                "Date": "Thu, 01 Jan 1970 00:00:10 GMT",
            },
            0.0,
            90.0,
        ),
        (
            1,
            {
                "Retry-After": "Thu, 01 Jan 1970 00:00:01 GMT",
                "Date": "Thu, 01 Jan 1970 00:00:10 GMT",
            },
            0.0,
            0.25,
        ),
        # counted from nothing: our clock is not theirs
        (1, {"Retry-After": "Fri, 01 Jan 2123 00:00:01 GMT"}, 0.0, 0.25),
        (1, {"Retry-After": "Fri, 01 Jan 2123 00:00:01 GMT", "Date": "now"}, 0.0, 0.25),
        (
            1,
            {"Retry-After": "Thu, 01 Jan 1970 00:01:40 GMT", "Date": "Thu, 01 Jan 1970 00:00:10"},
            0.0,
            90.0,
        ),
        (1, {"Retry-After": "soon"}, 0.0, 0.25),
        (1, {"Retry-After": "nan"}, 0.0, 0.25),
        (1, {"Retry-After": "-5"}, 0.0, 0.25),
    ],
)
def test_backoff(attempt: int, headers: dict[str, str], chance: float, seconds: float) -> None:
    assert backoff_s(attempt, 0.5, headers, chance=chance) == pytest.approx(seconds)
