"""The HTTP side: who may ask, which way a request goes, and what comes back. It knows nothing of engines: a desk answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Final

from aiohttp import web

from broker import wire
from text.openai import keys, tools
from text.openai.bodies import COMPLETION_TOKENS, MOST_CHOICES, Body, ChatBody, CompletionBody, parse
from text.openai.chunks import Chunks
from text.openai.desk import Desk, Handle, OneDesk, Served
from text.openai.problems import ENGINE_FAILED, Problem
from text.openai.replies import Choice, Writer
from text.openai.streaming import Feed, Stream
from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REPLY_ID_CHARS: Final = 24
CLOSE_S: Final = 2.0  # for answers that are being written when the server ends
RETRY_AFTER_S: Final = "1"
FAILED: Final = "the server failed; its log says why"


class _OneLine(logging.Filter):
    """What comes in and is no HTTP is somebody else's mistake: its error is a line and no traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple):
            said = str(record.exc_info[1]).strip().partition("\n")[0]
            record.msg, record.args, record.exc_info = f"{record.getMessage()}: {said}", None, None
        return True


_connections = logging.getLogger(f"{__name__}.connections")
_connections.addFilter(_OneLine())


class HttpServer:
    """/v1/chat/completions, /v1/completions, /v1/models and /health.

    A client that disconnects aborts its request. A stream brings tokens as the engine tells of them; those of an engine that gives
    whole outputs come in one piece.

    Args:
        tokenizer: of the model served.
        desk: who answers the request with this Authorization header; None where the key is missing or wrong.
        health: the state, ``serving`` or another, and the policy version.

    Attributes:
        address: for example ``http://127.0.0.1:8000/v1``; known once started.
    """

    def __init__(self, tokenizer: Tokenizer, desk: Callable[[str | None], Desk | None], health: Callable[[], tuple[str, int]]) -> None:
        self._tokenizer, self._desk, self._health_of = tokenizer, desk, health
        self._began = int(time.time())
        self._runner: web.AppRunner | None = None
        self._taken: socket.socket | None = None
        self.address = ""

    @classmethod
    def with_key(cls, handle: Handle, tokenizer: Tokenizer, served: Served, key: str) -> HttpServer:
        """One key, one model, one engine."""
        desk = OneDesk(handle, tokenizer, served)
        return cls(tokenizer, lambda header: desk if keys.matches(header, key) else None, lambda: (served.state(), served.policy_version()))

    async def start(self, bind: str, port: int) -> None:
        """Begin to answer; port 0 takes any that is free.

        Raises:
            OSError: the port cannot be had.
        """
        self.take(bind, port)
        await self.listen()

    def take(self, bind: str, port: int) -> None:
        """Have the port, long before there is anything to answer with: until ``listen`` who connects is refused.

        Raises:
            OSError: the port cannot be had.
        """
        family, _, _, _, where = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
        self._taken = socket.socket(family, socket.SOCK_STREAM)
        self._taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server that has just ended do not count
        self._taken.bind(where)

    async def listen(self) -> None:
        """Begin to answer at the port taken.

        Raises:
            OSError: another has begun to listen there meanwhile.
        """
        assert self._taken is not None
        app = web.Application(middlewares=[self._guard], client_max_size=wire.MAX_PAYLOAD_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, logger=_connections, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        await web.SockSite(self._runner, self._taken).start()
        host, taken = self._runner.addresses[0][:2]
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{taken}/v1"

    async def close(self) -> None:
        """Answer nothing more; idempotent."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._taken is not None:
            self._taken.close()
            self._taken = None

    # ---------------------------------------------------------------------------------------------- every call

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        """The key, and one shape for all that goes wrong."""
        try:
            if request.path != "/health":
                self._desk_of(request)
            return await handler(request)
        except Problem as problem:
            return _answer(problem)
        except ConnectionError:
            return _answer(Problem(503, "the client left while it was answered"))  # nobody reads it
        except web.HTTPRequestEntityTooLarge:
            return _answer(Problem(413, f"the body is larger than {wire.MAX_PAYLOAD_BYTES} bytes"))
        except web.HTTPException as error:
            return _answer(Problem(error.status, f"{request.method} {request.path}: {HTTPStatus(error.status).phrase.lower()}"))
        except Exception:
            log.exception("a request to %s failed", request.path)
            return _answer(Problem(500, FAILED))

    def _desk_of(self, request: web.Request) -> Desk:
        desk = self._desk(request.headers.get("Authorization"))
        if desk is None:
            raise Problem(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key")
        return desk

    async def _health(self, _: web.Request) -> web.Response:
        state, version = self._health_of()
        status = 200 if state == "serving" else 503
        return web.json_response({"status": state, "policy_version": version}, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        served = self._desk_of(request).served
        model = {
            "id": served.model,
            "object": "model",
            "created": self._began,
            "owned_by": "rlearner",
            "root": served.path,
            "max_model_len": served.max_context_tokens,
            "policy_version": served.policy_version(),
        }
        return web.json_response({"object": "list", "data": [model]})

    # ----------------------------------------------------------------------------------------------- generation

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), ChatBody)
        if body.offered:
            tools.spelling(self._tokenizer)  # refused before anything is sampled
        # An agent's calls begin alike: up to the user's first words they are one conversation.
        opening = next((n for n, message in enumerate(body.messages) if message.role == "user"), 0) + 1
        hint = json.dumps([message.plain() for message in body.messages[:opening]])
        return await self._generate(request, body, body.max_completion_tokens or body.max_tokens, hint)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = parse(await request.read(), CompletionBody)
        return await self._generate(request, body, body.max_tokens or COMPLETION_TOKENS, "")

    async def _generate(self, request: web.Request, body: Body, limit: int | None, hint: str) -> web.StreamResponse:
        desk = self._desk_of(request)
        _check_model(body, desk.served)
        _check_top(body, desk.served)
        prompts = await desk.prompts(body)
        _check_prompts(body, prompts, desk.served)
        reply_id = secrets.token_hex(REPLY_ID_CHARS // 2)
        conversation = body.prompt_cache_key or (hashlib.sha256(hint.encode()).hexdigest() if hint else reply_id)
        most = min(limit or desk.served.max_context_tokens, desk.served.max_context_tokens)
        asks = [_ask(body, prompts, index, most, reply_id, conversation) for index in range(len(prompts) * body.n)]
        news = asyncio.Event()
        feeds = [Feed(news, body.wanted_top if desk.served.top_logprobs else 0) for _ in asks]
        writer = Writer(body, self._tokenizer, desk.served.model, reply_id)
        given = [prompts[index // body.n] for index in range(len(asks))]
        # A task keeps what it was told of; a stream takes that out as it comes.
        one = _one if body.stream else _heard
        tasks = [asyncio.create_task(one(desk, index, given[index], ask, feeds[index])) for index, ask in enumerate(asks)]
        try:
            if body.stream:
                chunks = [Chunks(body, self._tokenizer, writer, index, prompt) for index, prompt in enumerate(given)]
                return await Stream(body, writer, feeds, tasks, chunks, news).send(request)
            return web.json_response(writer.whole(await asyncio.gather(*tasks)))
        finally:  # the client left, or one choice failed: nobody wants the others
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _check_model(body: Body, served: Served) -> None:
    if not served.any_model and body.model not in (None, served.model, served.path):
        raise Problem(404, f"there is no model {body.model!r} here, only {served.model!r}", param="model", code="model_not_found")


def _check_top(body: Body, served: Served) -> None:
    """A completion's ``logprobs: 1`` is how clients ask for the logprobs of what was sampled, and those are always known."""
    if not served.top_logprobs and body.wanted_top > (1 if isinstance(body, CompletionBody) else 0):
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        message = f"{param}: {body.wanted_top} is not supported by this server; its engine tells the logprobs of the sampled tokens alone"
        raise Problem(400, message, param=param, code="unsupported_parameter")


def _check_prompts(body: Body, prompts: Sequence[Sequence[int]], served: Served) -> None:
    if not prompts or not all(prompts):
        raise Problem(400, "the prompt is empty", param="prompt")
    if len(prompts) * body.n > MOST_CHOICES:
        raise Problem(400, f"{len(prompts)} prompts with n={body.n}: at most {MOST_CHOICES} choices", param="n")
    if (longest := max(map(len, prompts))) >= served.max_context_tokens:
        message = f"the prompt has {longest} tokens and leaves no room to generate in {served.max_context_tokens}"
        raise Problem(400, message, param="messages" if isinstance(body, ChatBody) else "prompt", code="context_length_exceeded")


def _ask(
    body: Body, prompts: Sequence[Sequence[int]], index: int, max_tokens: int, reply_id: str, conversation: str
) -> wire.GenerateRequest:
    """One choice. With a seed, the i-th of a prompt is sampled with seed + i; they would all be the same otherwise."""
    return wire.GenerateRequest(
        request_id=f"http.{reply_id}.{index}",
        conversation_id=f"{conversation}.{index}" if index else conversation,
        token_ids=wire.column(prompts[index // body.n], "<i4"),
        sampling=wire.SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(0, body.top_k),
            min_p=body.min_p,
            seed=None if body.seed is None else body.seed + index % body.n,
            stop=body.stops,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
        ),
        min_version=body.min_version,
        deadline_s=body.deadline_s,
    )


async def _heard(desk: Desk, index: int, prompt: Sequence[int], ask: wire.GenerateRequest, feed: Feed) -> Choice:
    """One choice with what was told of it beside the reply."""
    if not feed.tap.top_logprobs:
        return await _one(desk, index, prompt, ask)
    choice = await _one(desk, index, prompt, ask, feed)
    return replace(choice, top=[one for piece in feed.take() for one in piece.top])


async def _one(desk: Desk, index: int, prompt: Sequence[int], ask: wire.GenerateRequest, feed: Feed | None = None) -> Choice:
    """One choice.

    Raises:
        Problem: it has no output. What was cut short is an answer whose finish_reason says so.
    """
    try:
        reply = await desk.handle(ask, feed.tap if feed is not None else None)
    except Problem:
        raise
    except Exception:
        log.exception("request %s failed", ask.request_id)
        raise Problem(500, FAILED) from None
    if reply.error:
        raise Problem(500 if reply.error.startswith(ENGINE_FAILED) else 400, reply.error)
    if reply.finish_reason in ("abort", "deadline") and not reply.token_ids.data:
        if reply.finish_reason == "abort":
            raise Problem(503, f"the server is {desk.served.state()} and aborted the request; ask again")
        raise Problem(504, f"nothing was sampled within deadline_s={ask.deadline_s:g}", param="deadline_s")
    return Choice(index, prompt, reply)


def _answer(problem: Problem) -> web.Response:
    headers = {"Retry-After": RETRY_AFTER_S} if problem.status == 503 else {}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(problem.body, status=problem.status, headers=headers)
