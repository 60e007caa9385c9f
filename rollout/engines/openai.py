"""The engine ``openai``: forwards to an OpenAI-compatible endpoint, for judges, teachers and
baselines.

Its weights do not follow the learner, so it rejects the policy ``actor``. Its output is never
trained on, so logprobs that the endpoint does not return may be reported as 0.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from broker.contract import wire
from broker.contract.wire import ACTOR
from broker.errors import ConfigError, UserError
from rlearner_text.openai.client import EndpointClient, EndpointError
from rlearner_text.tokenizer import CHARS_PER_TOKEN, Tokenizer
from rollout.engines.args import OpenAIArgs
from rollout.engines.base import EngineConfig, EngineStats, GenerationOutput
from rollout.engines.random import end_token
from rollout.engines.turn_splitter import TurnSplitter
from rollout.engines.weightless import VERSION, WeightlessEngine
from rollout.job_queue import WAITING, GenerationJob
from rollout.scheduler import Scheduler

log = logging.getLogger(__name__)

_REASONS: Final[dict[object, wire.FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "deadline": "deadline",
}


@dataclass(eq=False)
class _Forwarded:
    """A request, its answer, and the task that forwards it once it has a slot."""

    request: wire.GenerateRequest
    job: GenerationJob
    answer: asyncio.Future[GenerationOutput]
    work: asyncio.Task[None] | None = None


class OpenAIEngine(WeightlessEngine):
    """See ``rollout.engines.base.Engine``.

    Output arrives in one piece, so a request that is aborted or reaches its deadline has none.
    """

    name = "openai"

    def __init__(self, config: EngineConfig) -> None:
        if config.section.policy == ACTOR:
            allowed = "engine openai does not follow the learner's weights; name another, for example --policy judge"
            raise ConfigError("rollout.policy", ACTOR, allowed)
        super().__init__(config)
        self._args = OpenAIArgs.model_validate(config.section.engine_args)
        self._slots = self._args.max_concurrency or config.section.max_running
        self._scheduler = Scheduler(
            num_slots=self._slots, max_running=self._slots, prefix_cache=False, version=VERSION
        )
        self._requests: dict[str, _Forwarded] = {}
        self._works: set[asyncio.Task[None]] = set()
        self._busy_s = self._busy_since = 0.0
        self._endpoint: EndpointClient | None = None
        self._model = self._args.model or ""
        self._no_logprobs = False  # whether the missing logprobs are already logged
        self._tokenizer: Tokenizer
        self._splitter: TurnSplitter
        self._end: int

    async def start(self) -> None:
        args = self._args
        path = self._config.model_path
        trusted = self._config.trust_remote_code
        template = self._config.chat_template
        self._tokenizer = await asyncio.to_thread(
            Tokenizer.load, path, trust_remote_code=trusted, chat_template=template
        )
        if args.api == "chat":
            self._splitter = TurnSplitter(self._tokenizer.render_chat)
        if not args.token_ids:
            self._end = end_token(self._tokenizer, path)
            log.warning(
                "answers of %s are text, tokenized here; logprobs are reported as 0", args.base_url
            )
        is_key_named = "api_key" in args.model_fields_set
        url = args.base_url
        times = args.retries
        secret = args.api_key
        key = (
            secret.require("rollout.engine_args.api_key", url) if is_key_named else secret.find(url)
        )
        self._endpoint = EndpointClient(
            url, key, timeout_s=args.timeout_s, retries=times, base_s=args.backoff_s
        )
        try:
            await self._find_model(self._endpoint)
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: wire.GenerateRequest) -> GenerationOutput:
        if (refused := self._refused(request, self._requests)) is not None:
            return refused
        if request.sampling.guides or request.sampling.logit_bias:
            return self._count(
                GenerationOutput(error="engine openai forwards neither guides nor logit_bias")
            )
        answer: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        forwarded = _Forwarded(request, GenerationJob.of(request, time.monotonic()), answer)
        self._requests[request.request_id] = forwarded
        self._scheduler.submit(forwarded.job)
        self._admit()
        try:
            await asyncio.wait([answer], timeout=request.deadline_s)
            return self._count(
                answer.result() if answer.done() else GenerationOutput(finish_reason="deadline")
            )
        finally:
            self._leave(forwarded)

    def abort(self, request_id: str) -> None:
        forwarded = self._requests.get(request_id)
        if forwarded is not None and not forwarded.answer.done():
            forwarded.answer.set_result(GenerationOutput(finish_reason="abort"))

    def stats(self) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            slots=self._slots,
            busy_s=self._busy_s + (now - self._busy_since if self._scheduler.num_running else 0.0),
            generated_tokens=self._generated,
            finished=dict(self._finished),
        )

    async def close(self) -> None:
        for request_id in list(self._requests):
            self.abort(request_id)
        self._closed.set()
        for work in self._works:
            work.cancel()
        await asyncio.gather(*self._works, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close()

    # ----------------------------------------------------------------------------------------------
    # requests

    async def _find_model(self, endpoint: EndpointClient) -> None:
        """Check that the endpoint answers and accepts the key, and use its only model unless one is
        configured.

        Raises:
            UserError: if the endpoint does not answer, rejects the key, or lists several models or
                none to choose from.
        """
        args = self._args
        try:
            listed = (await endpoint.get("/models")).get("data")
        except EndpointError as error:
            if error.status in (401, 403):
                raise UserError(
                    f"{args.base_url} does not accept the key in {args.api_key}: {error}"
                ) from None
            listed = None
        except RuntimeError as error:
            raise UserError(str(error)) from None
        names = (
            [str(model.get("id")) for model in listed if isinstance(model, dict)]
            if isinstance(listed, list)
            else []
        )
        if not self._model and len(names) != 1:
            allowed = f"{args.base_url} lists {', '.join(names) or 'no models'}; name one"
            raise ConfigError("rollout.engine_args.model", None, allowed)
        self._model = self._model or names[0]
        log.info("forwarding to %s, model %s", args.base_url, self._model)

    def _admit(self) -> None:
        """Forward waiting requests to the free slots."""
        now = time.monotonic()
        if not self._scheduler.num_running:
            self._busy_since = now
        for start in self._scheduler.admit(now):
            forwarded = self._requests[start.job.request_id]
            forwarded.work = asyncio.create_task(self._answer(forwarded))
            self._works.add(forwarded.work)
            forwarded.work.add_done_callback(self._works.discard)

    def _leave(self, forwarded: _Forwarded) -> None:
        """Forget a request that has its answer, or whose caller is gone, and free its slot for the
        next one.
        """
        del self._requests[forwarded.job.request_id]
        if forwarded.work is not None:
            forwarded.work.cancel()
        if forwarded.job.slot == WAITING:
            self._scheduler.abort(forwarded.job.request_id)
            return
        self._scheduler.finish(forwarded.job.slot, None)
        if not self._scheduler.num_running:
            self._busy_s += time.monotonic() - self._busy_since
        if not self._closed.is_set():
            self._admit()

    async def _answer(self, forwarded: _Forwarded) -> None:
        try:
            output = await self._forward(forwarded.request)
        except Exception as error:  # noqa: BLE001 - raised again by generate
            if not forwarded.answer.done():
                forwarded.answer.set_exception(error)
        else:
            if not forwarded.answer.done():
                forwarded.answer.set_result(output)

    async def _forward(self, request: wire.GenerateRequest) -> GenerationOutput:
        assert self._endpoint is not None
        context = request.token_ids.array().tolist()
        limit = min(
            request.sampling.max_tokens, self._config.section.max_context_tokens - len(context)
        )
        try:
            path, asked = self._asked(context)
        except ValueError as error:
            return GenerationOutput(error=str(error))
        try:
            body = _without_nulls(
                asked | self._sampling(request.sampling, limit) | self._args.extra_body
            )
            reply = await self._endpoint.post(path, body)
        except EndpointError as error:
            # concerns this request alone; other statuses affect all
            if error.status in (400, 413, 422):
                return GenerationOutput(error=str(error))
            raise RuntimeError(str(error)) from None
        return self._output(reply, request.sampling, limit)

    def _asked(self, context: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Return the path to post to and the fields that hold the context."""
        args = self._args
        common: dict[str, Any] = {"model": self._model}
        if args.token_ids:
            common["return_token_ids"] = True
            common["logprobs"] = args.api == "chat" or 1
        if args.api == "completions":
            prompt = (
                list(context)
                if args.token_ids
                else self._tokenizer.decode(context, skip_special_tokens=False)
            )
            return "/completions", common | {"prompt": prompt}
        messages = self._splitter.split(self._tokenizer.decode(context, skip_special_tokens=False))
        if messages is None:
            reason = "the context is not a conversation of the model's chat template"
            raise ValueError(f"{reason}; use engine_args.api=completions")
        return "/chat/completions", common | {"messages": messages}

    def _sampling(self, sampling: wire.SamplingParams, limit: int) -> dict[str, Any]:
        """Return the sampling fields; those that OpenAI does not define are sent only if they have
        an effect.
        """
        body: dict[str, Any] = {self._args.max_tokens_field: limit}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        extra = {
            "seed": sampling.seed,
            "stop": sampling.stop or None,
            "top_k": sampling.top_k or None,
            "min_p": sampling.min_p or None,
            "stop_token_ids": sampling.stop_token_ids if self._args.token_ids else None,
            "ignore_eos": sampling.ignore_eos or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "presence_penalty": sampling.presence_penalty or None,
        }
        return body | {key: value for key, value in extra.items() if value not in (None, [])}

    # ------------------------------------------------------------------------------------------------
    # replies

    def _output(
        self, reply: Mapping[str, Any], sampling: wire.SamplingParams, limit: int
    ) -> GenerationOutput:
        """Convert the endpoint's answer to an output.

        Raises:
            RuntimeError: if the answer does not fit the configuration.
        """
        try:
            choice = reply["choices"][0]
            reason = _REASONS.get(choice["finish_reason"])
            text = (
                choice["text"] if self._args.api == "completions" else choice["message"]["content"]
            ) or ""
        except (KeyError, IndexError, TypeError):
            raise RuntimeError(
                "the endpoint's answer has no choice with a text and a finish_reason"
            ) from None
        if reason is None or not isinstance(text, str):
            why = f"the endpoint ended the output with finish_reason {choice['finish_reason']!r}"
            return GenerationOutput(error=why)
        if self._args.token_ids:
            ids = _token_ids(choice.get("token_ids"))[:limit]
            logprobs = self._logprobs_of(choice.get("logprobs"), len(ids))
        else:
            ids = self._tokenizer.encode(text[: (limit + 1) * CHARS_PER_TOKEN])
            # the reply does not tell a stop string from the end of the turn
            if reason == "stop" and not sampling.stop:
                ids.append(self._end)
            if len(ids) > limit:
                ids = ids[:limit]
                reason = "length"
            logprobs = [0.0] * len(ids)
        return GenerationOutput(ids, logprobs, [(VERSION, len(ids))] if ids else [], reason)

    def _logprobs_of(self, reply: object, count: int) -> list[float]:
        """Return the endpoint's logprobs, zeros if they are missing."""
        values: list[Any] = []
        if isinstance(reply, dict):
            values = reply.get("token_logprobs") or [
                entry.get("logprob") for entry in reply.get("content") or []
            ]
        if len(values) >= count and all(
            isinstance(value, int | float) and math.isfinite(value) for value in values[:count]
        ):
            return [min(0.0, float(value)) for value in values[:count]]
        if not self._no_logprobs:
            self._no_logprobs = True
            log.warning("the endpoint returns no logprobs; they are reported as 0")
        return [0.0] * count


def _token_ids(reply: object) -> list[int]:
    if isinstance(reply, list) and all(
        isinstance(token_id, int) and 0 <= token_id < 2**31 for token_id in reply
    ):
        return reply
    raise RuntimeError(
        "the endpoint returns no token_ids; set rollout.engine_args.token_ids=false to exchange text"
    )


def _without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the fields that a null in ``extra_body`` removes."""
    return {key: value for key, value in body.items() if value is not None}
