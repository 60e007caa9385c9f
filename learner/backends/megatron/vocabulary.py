"""Computes logprobs and entropies from logits whose vocabulary is divided over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from learner.backends.megatron.model import megatron_library


def measure_shares(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    first: int,
    vocab: int,
    group: Any,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob and entropy in nats, (T,) float32 each, on all ranks.

    Every rank continues with the same loss, so the gradient of a sum over ranks is, on each rank,
    that of its own part.

    Args:
        logits: (T, columns) of this rank.
        targets: (T,) int64, of the whole vocabulary.
        temperature: (T,), None for 1.
        first: token of the first column.
        vocab: tokens from here on are padding, and have probability 0.
        group: of the ranks that share the vocabulary.
        entropy_grad: let gradient flow through the entropy too.
    """
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature[:, None]
    columns = logits.shape[1]
    if first + columns > vocab:
        padding = torch.arange(first, first + columns, device=logits.device) >= vocab
        logits = logits.masked_fill(padding, torch.finfo(torch.float32).min)
    with torch.no_grad():
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest[:, None]
    exponentials = shifted.exp()
    place = targets - first
    own = (place >= 0) & (place < columns)
    target_logits = torch.where(
        own, shifted.gather(1, place.clamp(0, columns - 1)[:, None])[:, 0], 0.0
    )
    total = _sum_over_ranks(exponentials.sum(-1), group)
    logprobs = _sum_over_ranks(target_logits, group) - total.log()
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        # sum of p (log total - shifted); padding has p = 0 and a finite logit
        entropy = total.log() - _sum_over_ranks((exponentials * shifted).sum(-1), group) / total
    return logprobs, entropy


def _sum_over_ranks(tensor: Tensor, group: Any) -> Tensor:
    total: Tensor = megatron_library().sum_of_shares(tensor.contiguous(), group=group)
    return total
