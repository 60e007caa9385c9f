"""Attention with the same bits for a token in any batch, for ``rollout.exact``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from learner.backends.models.attention import (
    InexactAttentionError,
    SequenceAttention,
    attend_plainly,
    compute_attention,
    describe_mask,
)
from rlearner_text.exact.blockwise_attention import attend_causally

EXACT_NAME: Final = "rlearner_exact"


class BlockwiseAttention(torch.autograd.Function):
    """``attend_causally`` with the gradient of torch's attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scaling = scaling
        return attend_causally(query, key, value, scaling=scaling)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [states.detach().requires_grad_() for states in ctx.saved_tensors]
            attended = attend_plainly(*leaves, scaling=ctx.scaling)
            return *torch.autograd.grad(attended, leaves, gradient), None


@dataclass(frozen=True)
class ExactAttention(SequenceAttention):
    """Plain causal attention of queries, keys and values, as ``SequenceAttention``."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute it.

        Raises:
            InexactAttentionError: if it has windows, caps or sinks.
        """
        is_local = self.pattern is not None and self.pattern.size < query.shape[2]
        if is_local or self.softcap is not None or self.sinks is not None:
            raise InexactAttentionError("its attention has windows, caps or sinks")
        scaling = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        apply: Callable[..., Tensor] = BlockwiseAttention.apply
        return apply(query, key, value, scaling)


def register_exact_attention() -> None:
    """Make ``ExactAttention`` known to transformers as EXACT_NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(EXACT_NAME, partial(compute_attention, kind=ExactAttention))
    AttentionMaskInterface.register(EXACT_NAME, describe_mask)
