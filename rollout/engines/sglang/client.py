"""Client of SGLang's HTTP API: request bodies out, parsed answers in.

Follows its documentation (native API, sampling parameters, SGLang for RL systems) and its release
0.5.23. Building bodies and parsing answers is pure. Two peculiarities: with ``ignore_eos`` it
ignores ``stop_token_ids``, too, so the output is cut here; and it returns logprobs under top-p or
min-p only if top-k bounds the candidates, so at most MOST_CANDIDATES are used then.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp
import numpy as np
import numpy.typing as npt

from broker.contract import wire

MOST_CANDIDATES: Final = 4096  # of a filtered distribution
# the server's limit; it aborts requests when ties make more
SERVER_CANDIDATES: Final = 2 * MOST_CANDIDATES
_SEEDS: Final = 1 << 31  # every release accepts seeds below this
_Reason = Literal["stop", "length", "abort"]
_REASONS: Final[Mapping[object, _Reason]] = {"stop": "stop", "length": "length", "abort": "abort"}


class SGLangRequestError(Exception):
    """SGLang rejected a request; one line."""


@dataclass(frozen=True, slots=True)
class GenerateLeg:
    """The result of one call of ``/generate``; a request that an update interrupts has several.

    Attributes:
        version_runs: pairs (weight version, number of tokens).
        spans: whether the server returned the version of each token, not only of the last.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    version_runs: Sequence[tuple[int, int]]
    reason: Literal["stop", "length", "abort"]
    prompt_tokens: int
    cached_tokens: int
    spans: bool


def is_filtered(sampling: wire.SamplingParams) -> bool:
    """Return whether cut-offs restrict the candidates, so that logprobs must be renormalised."""
    return sampling.temperature > 0 and (
        sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    )


def generate_body(
    rid: str,
    context: Sequence[int],
    sampling: wire.SamplingParams,
    limit: int,
    namespace: str,
    grammar: str = "",
) -> dict[str, Any]:
    """Return the body of ``/generate``.

    Args:
        rid: unique and not a prefix of another, because an abort affects all ids that begin with
            it.
        limit: most tokens to sample.
        namespace: of the prefix cache; namespaces share no KV.
        grammar: of the guides, in llguidance's variant of Lark, which the server accepts as
            ``ebnf``.
    """
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": min(sampling.top_k or MOST_CANDIDATES, MOST_CANDIDATES)
        if is_filtered(sampling)
        else -1,
        "min_p": sampling.min_p,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,  # stop strings may contain them
    }
    params |= {"stop": list(sampling.stop)} if sampling.stop else {}
    params |= {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
    params |= (
        {"frequency_penalty": sampling.frequency_penalty} if sampling.frequency_penalty else {}
    )
    params |= {"presence_penalty": sampling.presence_penalty} if sampling.presence_penalty else {}
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    params |= {"ebnf": grammar} if grammar else {}
    params |= {"sampling_seed": sampling.seed % _SEEDS} if sampling.seed is not None else {}
    body: dict[str, Any] = {"rid": rid, "input_ids": list(context), "sampling_params": params}
    body |= {"return_logprob": True, "extra_key": namespace}
    return body | ({"return_sampling_mask": True} if is_filtered(sampling) else {})


def score_body(rid: str, context: Sequence[int], top_k: int, namespace: str) -> dict[str, Any]:
    """Return a body of ``/generate`` that only scores a context, with the best ``top_k`` at each
    position.
    """
    sampling = wire.SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, max_tokens=1)
    body = generate_body(rid, context, sampling, 0, namespace)
    return body | {"logprob_start_len": 0, "top_logprobs_num": top_k}


def read_leg(reply: Mapping[str, Any], sampling: wire.SamplingParams) -> GenerateLeg:
    """Parse an answer of ``/generate``.

    Greedy tokens get logprob 0, that of a distribution with all its mass on one token; the server's
    value is ignored.

    Raises:
        SGLangRequestError: if the answer is malformed or incomplete.
    """
    meta = reply.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    reason = _REASONS.get(finish.get("type")) if isinstance(finish, dict) else None
    if not isinstance(meta, dict) or reason is None:
        raise SGLangRequestError(f"its answer has an unknown finish_reason: {finish!r}")
    try:
        entries = meta.get("output_token_logprobs") or []
        token_ids = [int(entry[1]) for entry in entries]
        logprobs = [_number(entry[0]) for entry in entries]
    except (TypeError, ValueError, IndexError):
        raise SGLangRequestError(
            "its output_token_logprobs are not pairs of a logprob and a token"
        ) from None
    if sampling.temperature == 0:
        logprobs = [0.0] * len(token_ids)
    elif is_filtered(sampling) and token_ids:
        told = meta.get("output_token_sampling_logprobs")
        if not isinstance(told, list) or len(told) != len(token_ids):
            why = "this SGLang does not return logprobs under top_p, top_k or min_p (return_sampling_mask)"
            raise SGLangRequestError(f"{why}; install a newer one")
        logprobs = [_number(value) for value in told]
    if not all(math.isfinite(value) for value in logprobs):
        raise SGLangRequestError("the model's logits are not finite")
    runs, spans = _version_runs(meta, len(token_ids))
    ends = (i for i, token in enumerate(token_ids) if token in sampling.stop_token_ids)
    if sampling.ignore_eos and (at := next(ends, None)) is not None:
        token_ids = token_ids[: at + 1]
        logprobs = logprobs[: at + 1]
        runs = truncate_runs(runs, at + 1)
        reason = "stop"
    prompt = int(meta.get("prompt_tokens") or 0)
    cached = int(meta.get("cached_tokens") or 0)
    return GenerateLeg(
        token_ids,
        [min(0.0, value) for value in logprobs],
        runs,
        reason=reason,
        prompt_tokens=prompt,
        cached_tokens=cached,
        spans=spans,
    )


def _number(value: Any) -> float:
    """Convert a number, with null for NaN, which JSON lacks."""
    return math.nan if value is None else float(value)


def _version_runs(meta: Mapping[str, Any], count: int) -> tuple[list[tuple[int, int]], bool]:
    versions = meta.get("weight_versions")
    try:
        if isinstance(versions, list) and versions:
            runs = [
                (int(span["version"]), int(span["end"]) - int(span["start"])) for span in versions
            ]
            runs = [run for run in runs if run[1] > 0]
            if sum(length for _, length in runs) == count:
                return runs, True
            raise SGLangRequestError(
                f"its weight_versions {versions!r} do not add up to {count} tokens"
            )
        return ([(int(meta["weight_version"]), count)] if count else []), False
    except (KeyError, TypeError, ValueError):
        version = versions or meta.get("weight_version")
        raise SGLangRequestError(f"its answer has no valid weight version: {version!r}") from None


def shift_runs(runs: Sequence[tuple[int, int]], version_before: int) -> list[tuple[int, int]]:
    """Return the versions that sampled the tokens, from those that SGLang recorded.

    SGLang records a weight change after the tokens processed so far, and processes a token while
    the next is being sampled (scheduler.py, event_loop_overlap): one token of the old weights gets
    the new version. So the first token of each version is moved to the version before. If there was
    no such token, one counts as older than it is, which is safe, but never as newer.

    Args:
        runs: pairs (version, number of tokens).
        before: the version when the request was sent.
    """
    shifted: list[tuple[int, int]] = []
    for version, count in runs:
        shifted += [(version_before, 1), (version, count - 1)]
        version_before = version
    return merge_runs(shifted)


def merge_runs(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge adjacent runs of one version and drop empty ones."""
    merged: list[tuple[int, int]] = []
    for version, count in runs:
        if merged and merged[-1][0] == version:
            merged[-1] = (version, merged[-1][1] + count)
        elif count > 0:
            merged.append((version, count))
    return merged


def truncate_runs(runs: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Return the runs of the first ``count`` tokens."""
    shortened = []
    for version, length in runs:
        shortened.append((version, max(0, min(length, count))))
        count -= length
    return merge_runs(shortened)


def read_scores(reply: Mapping[str, Any], num_tokens: int) -> npt.NDArray[np.float32]:
    """Return log p(token[i + 1] | token[: i + 1]), shape (n - 1,); the first token has none.

    Raises:
        SGLangRequestError: if the answer lacks them.
    """
    entries = (reply.get("meta_info") or {}).get("input_token_logprobs") or []
    values = [entry[0] for entry in entries[1:]]
    if len(entries) != num_tokens or any(value is None for value in values):
        raise SGLangRequestError(
            f"it returned the logprobs of {len(entries)} tokens of a context of {num_tokens}"
        )
    return np.array(values, dtype=np.float32)


def read_top(
    reply: Mapping[str, Any], num_tokens: int, k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the k likeliest tokens after each token but the last, and their logprobs, (n - 1, k)
    each, descending.

    Raises:
        SGLangRequestError: if the answer lacks them.
    """
    if not k:
        return np.zeros((num_tokens - 1, 0), np.int32), np.zeros((num_tokens - 1, 0), np.float32)
    rows = ((reply.get("meta_info") or {}).get("input_top_logprobs") or [])[1:]
    if len(rows) != num_tokens - 1 or any(row is None or len(row) != k for row in rows):
        raise SGLangRequestError(
            f"it did not return the {k} likeliest tokens at each of {num_tokens - 1} positions"
        )
    ids = np.array([[entry[1] for entry in row] for row in rows], dtype=np.int32).reshape(-1, k)
    return ids, np.array([[entry[0] for entry in row] for row in rows], dtype=np.float32).reshape(
        -1, k
    )


class SGLangClient:
    """Client of one server. A call waits up to ``timeout_s``; without one, requests are aborted at
    their deadlines.

    Args:
        key: that the server requires.
    """

    def __init__(self, base_url: str, key: str) -> None:
        self._base_url = base_url
        # A new connection each time: the server closes idle ones, and a request that hits this is
        # not safe to repeat.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            headers={"Authorization": f"Bearer {key}"},
        )

    async def close(self) -> None:
        await self._session.close()

    async def healthy(self) -> bool:
        """Return whether the server answers requests yet."""
        try:
            limit = aiohttp.ClientTimeout(total=10)
            async with self._session.get(self._base_url + "/health", timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(
        self, path: str, body: Mapping[str, Any], timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Post a body and return the answer, empty if it has no JSON object.

        Raises:
            SGLangRequestError: if the status is not 200 or ``success`` is false.
            ConnectionError: if the server is gone or does not answer in time.
        """
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.post(
                self._base_url + path, json=body, timeout=limit
            ) as response:
                raw = await response.read()
                status = response.status
        except TimeoutError:
            raise ConnectionError(f"SGLang gave no answer to {path} in {timeout_s:g} s") from None
        except aiohttp.ClientError as error:
            raise ConnectionError(
                f"SGLang's {path}: {' '.join(str(error).split()) or type(error).__name__}"
            ) from None
        reply = _object(raw)
        if status != 200 or reply.get("success") is False:
            raise SGLangRequestError(f"SGLang answered {path} with {status}: {_said(raw, reply)}")
        return reply

    async def abort(self, rid: str) -> None:
        """Abort a request, which then returns its partial output; an empty id aborts all."""
        try:
            await self.post("/abort_request", {"rid": rid, "abort_all": not rid}, timeout_s=30.0)
        except (SGLangRequestError, ConnectionError, asyncio.CancelledError):
            return  # the request's own call reports a dead server


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _said(raw: bytes, reply: Mapping[str, Any]) -> str:
    error = reply.get("error", reply.get("message", ""))
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text or raw[:300].decode(errors="replace")).split())[:300]
