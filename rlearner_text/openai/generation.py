"""Handles one generation request, from its body to its whole or streamed answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from aiohttp import web

from broker.contract import wire
from rlearner_text.openai import tool_calls
from rlearner_text.openai.answer_guides import guides_of
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter
from rlearner_text.openai.backends import ApiBackend, ServedModel
from rlearner_text.openai.connections import call_of
from rlearner_text.openai.http_errors import ENGINE_FAILED, HttpError
from rlearner_text.openai.request_bodies import ChatBody, CompletionBody, GenerationBody
from rlearner_text.openai.streaming import AnswerFormat, EventStream, TokenBuffer
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REPLY_ID_CHARS: Final = 24
FAILED: Final = "the server failed; see its log"


async def generate(
    request: web.Request,
    backend: ApiBackend,
    tokenizer: Tokenizer,
    body: GenerationBody,
    limit: int | None,
    form: Callable[[AnswerWriter], AnswerFormat],
) -> web.StreamResponse:
    """Sample the choices of a request and answer it.

    Args:
        limit: most tokens to sample; None: as many as fit.
        form: creates the format of the answer.

    Raises:
        HttpError: if the request is invalid, its key has no tokens left, or there is no output.
    """
    call = call_of(request)
    assert call is not None
    _check_model(body, backend.served_model)
    _check_top(body, backend.served_model)
    if isinstance(body, ChatBody) and body.offered:
        # Rejected before anything is sampled.
        tool_calls.tool_syntax(tokenizer)
    guides = (
        await asyncio.to_thread(guides_of, body, tokenizer) if isinstance(body, ChatBody) else []
    )
    if (
        odd := next(
            (token_id for token_id in body.biases if token_id >= tokenizer.vocab_size), None
        )
    ) is not None:
        allowed = f"token ids below {tokenizer.vocab_size}"
        raise HttpError(400, f"logit_bias: {odd} is not allowed; {allowed}", param="logit_bias")
    prompts = await backend.prompts(body)
    _check_prompts(body, prompts, backend.served_model)
    reply_id = secrets.token_hex(REPLY_ID_CHARS // 2)
    most = min(
        limit or backend.served_model.max_context_tokens, backend.served_model.max_context_tokens
    )
    conversation = _conversation_id(body) or reply_id
    requests = [
        _build_request(
            body,
            prompts,
            index,
            max_tokens=most,
            reply_id=reply_id,
            conversation=conversation,
            guides=guides,
        )
        for index in range(len(prompts) * body.n)
    ]
    has_tokens = asyncio.Event()
    feeds = [
        TokenBuffer(has_tokens, body.wanted_top if backend.served_model.top_logprobs else 0)
        for _ in requests
    ]
    writer = form(AnswerWriter(body, tokenizer, backend.served_model.model, reply_id))
    prompt_of_choice = [prompts[index // body.n] for index in range(len(requests))]
    # tokens of each choice
    room = [
        min(most, backend.served_model.max_context_tokens - len(prompt))
        for prompt in prompt_of_choice
    ]
    call.reserve(sum(map(len, prompts)), sum(room))
    # A stream takes pieces from the feeds as they arrive; otherwise each task collects its own.
    answer_one = _sample_choice if body.stream else _sample_with_top
    tasks = [
        asyncio.create_task(
            answer_one(backend, index, prompt_of_choice[index], request_of_choice, feeds[index])
        )
        for index, request_of_choice in enumerate(requests)
    ]
    try:
        if body.stream:
            events = [writer.events(index, prompt) for index, prompt in enumerate(prompt_of_choice)]
            return await EventStream(feeds, tasks, events, writer, has_tokens).send(request)
        return web.json_response(writer.whole(await asyncio.gather(*tasks)))
    finally:  # if the client disconnects or one choice fails, cancel the others
        for task in tasks:
            task.cancel()
        replies = await asyncio.gather(*tasks, return_exceptions=True)
        call.settle(sum(map(_count_sampled, replies, room)))


def _count_sampled(reply: AnswerChoice | BaseException, room: int) -> int:
    """Return the tokens that a choice counts for: all possible ones if its client left."""
    if isinstance(reply, asyncio.CancelledError):
        return room
    return 0 if isinstance(reply, BaseException) else len(reply.reply.token_ids.array())


def _conversation_id(body: GenerationBody) -> str:
    """Return the conversation id: an agent's calls share messages up to the first user message."""
    if body.prompt_cache_key or not isinstance(body, ChatBody):
        return body.prompt_cache_key
    opening = next((n for n, message in enumerate(body.messages) if message.role == "user"), 0) + 1
    return hashlib.sha256(
        json.dumps([message.plain() for message in body.messages[:opening]]).encode()
    ).hexdigest()


def _check_model(body: GenerationBody, served_model: ServedModel) -> None:
    if not served_model.any_model and body.model not in (
        None,
        served_model.model,
        served_model.path,
    ):
        raise unknown_model(body.model, served_model)


def unknown_model(name: str | None, served_model: ServedModel) -> HttpError:
    """Return the error for a model that is not served."""
    return HttpError(
        404,
        f"there is no model {name!r}, only {served_model.model!r}",
        param="model",
        code="model_not_found",
    )


def _check_top(body: GenerationBody, served_model: ServedModel) -> None:
    """Check ``top_logprobs``; a completion's ``logprobs: 1`` asks for sampled tokens only."""
    if not served_model.top_logprobs and body.wanted_top > (
        1 if isinstance(body, CompletionBody) else 0
    ):
        param = "top_logprobs" if isinstance(body, ChatBody) else "logprobs"
        reason = "its engine returns the logprobs of sampled tokens only"
        raise HttpError(
            400,
            f"{param}: {body.wanted_top} is not supported by this server; {reason}",
            param=param,
            code="unsupported_parameter",
        )


def _check_prompts(
    body: GenerationBody, prompts: Sequence[Sequence[int]], served_model: ServedModel
) -> None:
    if not prompts or not all(prompts):
        raise HttpError(400, "the prompt is empty", param="prompt")
    if (longest := max(map(len, prompts))) >= served_model.max_context_tokens:
        message = (
            f"the prompt has {longest} tokens and leaves no room to generate in "
            f"{served_model.max_context_tokens}"
        )
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        raise HttpError(400, message, param=param, code="context_length_exceeded")


def _build_request(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    index: int,
    max_tokens: int,
    reply_id: str,
    conversation: str,
    guides: list[wire.Guide],
) -> wire.GenerateRequest:
    """Return the request of one choice; the i-th of a prompt uses seed + i, so they differ."""
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
            frequency_penalty=body.frequency_penalty,
            presence_penalty=body.presence_penalty,
            logit_bias=body.biases,
            guides=guides,
        ),
        min_version=body.min_version,
        deadline_s=body.deadline_s,
    )


async def _sample_with_top(
    backend: ApiBackend,
    index: int,
    prompt: Sequence[int],
    ask: wire.GenerateRequest,
    feed: TokenBuffer,
) -> AnswerChoice:
    """Sample one choice, with the likeliest tokens from its feed."""
    if not feed.listener.top_logprobs:
        return await _sample_choice(backend, index, prompt, ask)
    choice = await _sample_choice(backend, index, prompt, ask, feed)
    return replace(choice, top=[entry for piece in feed.take() for entry in piece.top])


async def _sample_choice(
    backend: ApiBackend,
    index: int,
    prompt: Sequence[int],
    ask: wire.GenerateRequest,
    feed: TokenBuffer | None = None,
) -> AnswerChoice:
    """Sample one choice.

    Raises:
        HttpError: if it has no output. Partial output is an answer, marked by its finish_reason.
    """
    try:
        reply = await backend.handle(ask, feed.listener if feed is not None else None)
    except HttpError:
        raise
    except Exception:
        log.exception("request %s failed", ask.request_id)
        raise HttpError(500, FAILED) from None
    if reply.error:
        raise HttpError(500 if reply.error.startswith(ENGINE_FAILED) else 400, reply.error)
    if reply.finish_reason in ("abort", "deadline") and not reply.token_ids.data:
        if reply.finish_reason == "abort":
            raise HttpError(
                503,
                f"the server is {backend.served_model.state()} and aborted the request; ask again",
            )
        raise HttpError(
            504, f"nothing was sampled within deadline_s={ask.deadline_s:g}", param="deadline_s"
        )
    return AnswerChoice(index, prompt, reply)
