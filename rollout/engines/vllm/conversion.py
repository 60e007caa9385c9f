"""Converts sampling parameters to vLLM's, and its completions to outputs (pure)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rollout.engines.base import GenerationOutput

NOT_FINITE: Final = "the model's logits are not finite"
_REASONS: Final[dict[str, wire.FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",
}
_WORD: Final = (1 << 64) - 1


def version_label(serial: int, version: int) -> str:
    """Return the label that vLLM attaches to every token: serial number of the weight load, and
    policy version.
    """
    return f"{serial}:{version}"


def serial_of(noted: str) -> int:
    return int(noted.partition(":")[0])


def version_runs(spans: Sequence[Any], keep_before: int | None = None) -> list[tuple[int, int]]:
    """Convert vLLM's spans to pairs (policy_version, number of tokens).

    Args:
        spans: each with ``version`` (a ``version_label``), ``start`` and ``end``.
        keep_before: stop at the first load with this serial number or a larger one.
    """
    runs: list[tuple[int, int]] = []
    for span in spans:
        if keep_before is not None and serial_of(span.version) >= keep_before:
            break
        version = int(span.version.partition(":")[2])
        count = span.end - span.start
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + count)
        elif count:
            runs.append((version, count))
    return runs


def seed_of(seed: int | None, num_prompt: int) -> int | None:
    """Return vLLM's seed for a request. It includes the position, because vLLM restarts its random
    numbers with every request: one resumed from a partial output must not repeat the numbers that
    its context was drawn with."""
    if seed is None:
        return None
    # splitmix64, as in rollout/engines/hf/sampling.py
    x = (seed + num_prompt * 0x9E3779B97F4A7C15) & _WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return (x ^ (x >> 31)) >> 1  # vLLM accepts at most 63 bits


def sampling_fields(
    sampling: wire.SamplingParams, num_prompt: int, max_context: int, end_ids: Collection[int]
) -> dict[str, Any]:
    """Return the fields of vLLM's SamplingParams."""
    ends = {*(() if sampling.ignore_eos else end_ids), *sampling.stop_token_ids}
    stop = [text for text in sampling.stop if text]
    reshaping = {
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": sampling.logit_bias,
    }
    return {name: value for name, value in reshaping.items() if value} | {
        "max_tokens": min(sampling.max_tokens, max_context - num_prompt),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        # a separate generator takes time
        "seed": seed_of(sampling.seed, num_prompt) if sampling.temperature else None,
        "stop": stop,
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,  # stop_token_ids has the end tokens, so that no others end the output
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(stop),
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
    }


def output_of(
    completion: Any,
    cached: int | None,
    temperature: float,
    keep_before: int | None = None,
    reshaped: bool = False,
) -> GenerationOutput:
    """Convert vLLM's completion to an output.

    Args:
        completion: a finished CompletionOutput.
        cached: context tokens found in the cache.
        temperature: as requested.
        keep_before: cut off tokens of loads from this serial number on, whose weights failed their
            probe.
        reshaped: whether the request reshapes distributions; vLLM does not report where, so all
            tokens count.
    """
    reason = _REASONS.get(completion.finish_reason)
    if reason is None:
        return GenerationOutput(error=f"vLLM ended the request with {completion.finish_reason!r}")
    tokens = list(completion.token_ids)
    logprobs = list(completion.logprobs.logprobs) if completion.logprobs is not None else []
    if len(logprobs) != len(tokens):
        return GenerationOutput(
            error=f"vLLM returned {len(logprobs)} logprobs for {len(tokens)} tokens"
        )
    if not all(map(math.isfinite, logprobs)):
        return GenerationOutput(error=NOT_FINITE)
    runs = version_runs(completion.weight_versions or (), keep_before)
    count = sum(number for _, number in runs)
    if count < len(tokens):
        if keep_before is None:
            return GenerationOutput(
                error=f"vLLM returned the weight versions of {count} of {len(tokens)} tokens"
            )
        tokens = tokens[:count]
        logprobs = logprobs[:count]
        reason = "abort"
    if temperature == 0:
        logprobs = [0.0] * len(tokens)
    flags = [True] * len(tokens) if reshaped else ()
    return GenerationOutput(tokens, logprobs, runs, reason, cached or 0, reshaped=flags)


def context_logprobs(token_ids: Sequence[int], rows: Sequence[Any]) -> npt.NDArray[np.float32]:
    """Return the logprob of each token but the first, (n - 1,), from vLLM's rows of token to
    Logprob.
    """
    entries = [row[token] for token, row in zip(token_ids[1:], rows, strict=True)]
    return np.array([entry.logprob for entry in entries], dtype=np.float32)


def top_rows(rows: Sequence[Any], k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return the k likeliest tokens at each position, descending, (n, k) each, from vLLM's rows of
    token to Logprob.
    """
    ids = np.zeros((len(rows), k), np.int32)
    logprobs = np.zeros((len(rows), k), np.float32)
    for index, row in enumerate(rows):
        best = sorted(row.items(), key=lambda item: -item[1].logprob)[:k]
        ids[index] = [token for token, _ in best]
        logprobs[index] = [entry.logprob for _, entry in best]
    return ids, logprobs
