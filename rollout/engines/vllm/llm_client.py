"""Sends requests to a running vLLM and scores given contexts."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rollout.engines.vllm.conversion import context_logprobs

CompletionListener = Callable[[Any, Sequence[Any]], Awaitable[None]]

INTERNAL: Final = "\0"  # prefix of the ids of this engine's own requests


class LLMClient:
    """Client of an AsyncLLM.

    Attributes:
        salt: of the prefix cache; blocks under another salt are never reused.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.salt = 0
        self._numbers = itertools.count()
        self._scoring = asyncio.Semaphore(1)

    async def ask(
        self,
        prompt: list[int],
        params: Any,
        request_id: str,
        ended: Callable[[], bool] = lambda: False,
        told: CompletionListener | None = None,
    ) -> Any:
        """Run one request in vLLM and return its last output.

        Args:
            params: vLLM's SamplingParams, made with ``final_only``, or with ``as_deltas`` for
                streaming.
            ended: returns whether the request was ended before vLLM knew it.
            told: awaited with each completion and the spans of all tokens so far; vLLM does not
                wait for it.
        """
        from vllm.inputs.engine import tokens_input

        queue = await self._llm.add_request(
            request_id, tokens_input(prompt, cache_salt=str(self.salt)), params
        )
        try:
            if ended():
                await self._llm.abort(request_id)
            while True:
                output = await queue.get()
                if told is not None:
                    await told(output.outputs[0], self._spans(queue.request_id, output.outputs[0]))
                if output.finished:
                    return output
        except BaseException:  # vLLM must not continue an abandoned request
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()

    def _spans(self, name: str, completion: Any) -> Sequence[Any]:
        """Return which tokens of a request came from which load; empty if vLLM has dropped the
        request.
        """
        if completion.weight_versions is not None:
            spans: Sequence[Any] = completion.weight_versions
            return spans
        state = self._llm.output_processor.request_states.get(name)
        return (state._weight_version_spans() or ()) if state is not None else ()

    async def context_rows(self, token_ids: list[int], k: int) -> Sequence[Any]:
        """Return vLLM's logprobs of each context token but the first and of the k likeliest;
        ignores the cache.
        """
        from vllm import SamplingParams

        if len(token_ids) < 2:
            return []
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=k, detokenize=False, ignore_eos=True, **final_only()
        )
        async with self._scoring:
            final = await self.ask(token_ids, params, f"{INTERNAL}{next(self._numbers)}")
        rows: Sequence[Any] = final.prompt_logprobs[1:]
        return rows

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return log p(token[i + 1] | token[: i + 1]) at temperature 1, shape (n - 1,)."""
        return context_logprobs(token_ids, await self.context_rows(list(token_ids), 0))

    def in_flight_tokens(self) -> int:
        """Return the number of tokens sampled by unanswered requests."""
        states = self._llm.output_processor.request_states.values()
        requests = [state for state in states if not state.external_req_id.startswith(INTERNAL)]
        return sum(state.detokenizer.num_output_tokens() for state in requests)

    def generated(self, request_id: str) -> int:
        """Return the number of tokens sampled by a request, 0 if vLLM does not know it."""
        processor = self._llm.output_processor
        states = [
            processor.request_states.get(name)
            for name in processor.external_req_ids.get(request_id, ())
        ]
        return sum(state.detokenizer.num_output_tokens() for state in states if state is not None)

    def tokenless(self, request_ids: Sequence[str]) -> list[str]:
        """Return the requests that are in vLLM and have no token yet."""
        processor = self._llm.output_processor
        requests = []
        for request_id in request_ids:
            states = [
                processor.request_states.get(name)
                for name in processor.external_req_ids.get(request_id, ())
            ]
            if states and all(
                state is not None and not state.detokenizer.num_output_tokens() for state in states
            ):
                requests.append(request_id)
        return requests


def final_only() -> dict[str, Any]:
    """Return the field of SamplingParams for a single output at the end."""
    from vllm.sampling_params import RequestOutputKind

    return {"output_kind": RequestOutputKind.FINAL_ONLY}


def as_deltas() -> dict[str, Any]:
    """Return the field of SamplingParams for an output per token, or per several if the reader is
    slow.
    """
    from vllm.sampling_params import RequestOutputKind

    return {"output_kind": RequestOutputKind.DELTA}


def first_line(error: BaseException) -> str:
    """Return the first line of a vLLM error, shortened."""
    whole = error.__cause__ if error.__cause__ is not None and not str(error) else error
    return next(
        (line.strip() for line in str(whole).splitlines() if line.strip()), type(whole).__name__
    )[:400]
