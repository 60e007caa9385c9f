"""Batched sampling: one token per row, and its logprob under the distribution it was drawn from.

Conventions:

- Temperature first, then top-k, then top-p over the remaining candidates, then min-p relative to
  the best candidate; the rest is renormalised. Candidates of equal probability are ranked by the
  sort, and top-k keeps exactly k of them.
- Temperature 0 is greedy: a distribution with all its mass on one token, so the logprob is 0.
- Randomness is counter-based, not stateful: the uniform number of a token is a hash of the
  request's seed and the token's position in its context. The same seed, context and weights
  therefore give the same token in any batch, and a request resumed on another server from its
  partial output continues with the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from broker.contract.wire import SamplingParams

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX2: Final = np.uint64(0x94D049BB133111EB)
_OFF: Final = 1 << 30  # top-k that keeps everything
_BLOCK: Final = 128  # tokens whose probabilities are added up first
_CACHED: Final = 1 << 19  # numbers of float32 that a CPU's caches hold, several times
_JUST_BELOW_1: Final = 1 - 2.0**-52
_CANDIDATES: Final = 1024  # sorted first; the whole vocabulary only if top-p or min-p keeps more


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix bits with the output function of splitmix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return numbers in [0, 1) that depend only on seed and position; both shape (n,)."""
    with np.errstate(over="ignore"):
        x = _mix(_mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of n rows as tensors; reused while the rows stay the same.

    Attributes:
        temperature: (n, 1) float32, 1 for greedy rows; None if 1 everywhere.
        greedy: (n,) bool; None if no row is.
        filtered: (m,) indices of the rows with top-k, top-p or min-p; None if there are none.
        top_k, top_p, min_p: (m, 1), of the filtered rows.
        max_top_k: largest top-k in use, 0 if there is none.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    filtered: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    max_top_k: int

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> SamplingBatch:
        def put(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [p.temperature == 0 for p in params]
        temperature = [p.temperature or 1.0 for p in params]
        rows = [
            i
            for i, p in enumerate(params)
            if (p.top_k > 0 or p.top_p < 1 or p.min_p > 0) and p.temperature != 0
        ]
        return SamplingBatch(
            temperature=put(temperature, torch.float32)[:, None]
            if any(t != 1 for t in temperature)
            else None,
            greedy=put(greedy, torch.bool) if any(greedy) else None,
            filtered=put(rows, torch.long) if rows else None,
            top_k=put([params[i].top_k or _OFF for i in rows], torch.long)[:, None],
            top_p=put([params[i].top_p for i in rows], torch.float32)[:, None],
            min_p=put([params[i].min_p for i in rows], torch.float32)[:, None],
            max_top_k=max((params[i].top_k for i in rows), default=0),
        )


def sample(
    logits: torch.Tensor, batch: SamplingBatch, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: (n, vocabulary), any floating dtype.
        batch: parameters of the n rows.
        uniform: (n,) float64 in [0, 1), one number per row.

    Returns:
        Tokens (n,) int64 and logprobs (n,) float32; a logprob is not finite if the row's logits are
        not.
    """
    num_rows = len(logits)
    tokens = torch.empty(num_rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if batch.filtered is None or len(batch.filtered) < num_rows:
        # on a CPU a few rows at a time, whose numbers stay in its caches
        step = max(1, _CACHED // logits.shape[-1]) if logits.device.type == "cpu" else num_rows
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            scaled = _scaled(logits[rows], batch.temperature, rows)
            tokens[rows], logprobs[rows] = _draw(scaled.log_softmax(-1), uniform[rows])
            if batch.greedy is not None:
                tokens[rows] = torch.where(batch.greedy[rows], scaled.argmax(-1), tokens[rows])
    if (cut := batch.filtered) is not None:
        scaled = _scaled(logits[cut], batch.temperature, cut)
        tokens[cut], logprobs[cut] = _draw_filtered(scaled.log_softmax(-1), batch, uniform[cut])
    if batch.greedy is not None:
        # 0, or NaN if the logits are not finite
        logprobs = torch.where(batch.greedy, logprobs - logprobs, logprobs)
    return tokens, logprobs


def _scaled(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    rows: torch.Tensor | slice = slice(None),
) -> torch.Tensor:
    return logits.float() if temperature is None else logits.float() / temperature[rows]


def likeliest(
    logits: torch.Tensor, params: Sequence[SamplingParams], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's k likeliest tokens and logprobs under its sampling distribution (greedy
    rows: temperature 1).

    Args:
        logits: (n, vocabulary), as for ``sample``.
        params: of the n rows.

    Returns:
        Tokens (n, k) int64 and logprobs (n, k) float32, descending; -inf for tokens that the row's
        cut-offs exclude.
    """
    batch = SamplingBatch.of(params, logits.device)
    logprobs = _scaled(logits, batch.temperature).log_softmax(-1)
    values, tokens = logprobs.topk(k, dim=-1, sorted=True)
    if batch.filtered is not None:
        width = min(max(_CANDIDATES, batch.max_top_k, k), logprobs.shape[-1])
        candidates, order = _kept(logprobs[batch.filtered], batch, width)
        values[batch.filtered] = candidates.log_softmax(-1)[:, :k]
        tokens[batch.filtered] = order[:, :k]
    return tokens, values


def probability_moved(
    logits: torch.Tensor, reshaped: torch.Tensor, params: Sequence[SamplingParams]
) -> torch.Tensor:
    """Return how much probability a change of the logits moves between tokens, after temperature
    and cut-offs.

    Args:
        logits, reshaped: (n, vocabulary), the model's and the changed ones.
        params: of the n rows.

    Returns:
        (n,) float32, the total variation distance of the two distributions, from 0 to 1.
    """
    batch = SamplingBatch.of(params, logits.device)
    return (_distribution(logits, batch) - _distribution(reshaped, batch)).abs().sum(-1) / 2


def _distribution(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the sampling distribution of each row, (n, vocabulary) probabilities."""
    logprobs = _scaled(logits, batch.temperature).log_softmax(-1)
    if batch.filtered is not None:
        filtered = logprobs[batch.filtered]
        candidates, order = _kept(
            filtered, batch, min(max(_CANDIDATES, batch.max_top_k), logprobs.shape[-1])
        )
        logprobs[batch.filtered] = torch.full_like(filtered, float("-inf")).scatter(
            -1, order, candidates.log_softmax(-1)
        )
    probs = logprobs.exp()
    if batch.greedy is None:
        return probs
    certain = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(probs.dtype)
    return torch.where(batch.greedy[:, None], certain, probs)


def _draw(logprobs: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample by inverting the cumulative distribution, in float64 to keep a long tail of small
    probabilities: first the block of tokens, then the token in it, which adds up few numbers.
    """
    probs = logprobs.exp()
    if padding := -probs.shape[-1] % _BLOCK:
        probs = torch.nn.functional.pad(probs, (0, padding))
    blocks = probs.view(len(probs), -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    block, rest = _invert(sums, uniform[:, None] * sums.sum(-1, keepdim=True))
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
    token, _ = _invert(inside, rest)
    # not a number: any token
    tokens = (block * _BLOCK + token).clamp_(max=logprobs.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]


def _invert(masses: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the place of the first masses whose sum exceeds a target, and what of the target is
    left for it.

    Args:
        masses: (n, m) float64, at least 0.
        target: (n, 1) float64.

    Returns:
        Both (n, 1); the mass at the place is above 0, whatever is lost to rounding.
    """
    cumulative = masses.cumsum(-1)
    below_all = cumulative[:, -1:] * _JUST_BELOW_1
    target = target.clamp(min=0).minimum(below_all)
    place = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[-1] - 1)
    return place, target - (cumulative - masses).gather(-1, place)


def _draw_filtered(
    logprobs: torch.Tensor, batch: SamplingBatch, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    candidates, order = _kept(
        logprobs, batch, min(max(_CANDIDATES, batch.max_top_k), logprobs.shape[-1])
    )
    tokens, chosen_logprobs = _draw(candidates.log_softmax(-1), uniform)
    return order.gather(-1, tokens[:, None])[:, 0], chosen_logprobs


def _kept(
    logprobs: torch.Tensor, batch: SamplingBatch, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logprobs (-inf: filtered out) and ids of the ``width`` best candidates, descending,
    both (m, width).
    """
    best, order = logprobs.topk(width, dim=-1, sorted=True)
    probs = best.exp()
    rank = torch.arange(width, device=logprobs.device)
    in_k = rank < batch.top_k
    better_mass = (probs * in_k).cumsum(-1) - probs  # mass of all better candidates
    mass_k = torch.where(
        batch.top_k <= width, (probs * in_k).sum(-1, keepdim=True), torch.ones_like(batch.top_p)
    )
    keep = in_k & (better_mass < batch.top_p * mass_k) & (probs >= batch.min_p * probs[:, :1])
    keep[:, 0] = True
    if width < logprobs.shape[-1] and bool((keep[:, -1] & (batch.top_k[:, 0] > width)).any()):
        # the last candidate passes: there may be more
        return _kept(logprobs, batch, logprobs.shape[-1])
    return best.masked_fill(~keep, float("-inf")), order
