"""Computes logprob and entropy of tokens in the memory of their logits, block by block.

The plain formula reads and writes the whole (tokens, vocabulary) matrix about ten times and holds
five copies of it. Here a block of rows is read once, its probabilities replace the logits, and the
backward pass turns these into the gradient, also in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

# Of one block of rows in float32: half of a core's second-level cache.
BLOCK_BYTES: Final = {"cpu": 1 << 20}
# On a GPU: large enough to hide the start of kernels.
_OTHER_BLOCK_BYTES: Final = 1 << 26
_LOWEST: Final = torch.finfo(torch.float32).min


def token_scores(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor | None = None,
    *,
    entropy_grad: bool = False,
    owned: bool,
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob and its distribution's entropy in nats, (T,) float32 each.

    Args:
        logits: (T, vocabulary), of any floating dtype; -inf has probability 0.
        targets: (T,) int64.
        temperature: (T,) float32, None for 1.
        entropy_grad: let gradient flow through the entropy too.
        owned: float32 logits are no longer needed by anyone and may be overwritten.
    """
    own = owned or logits.dtype != torch.float32
    scores: tuple[Tensor, Tensor] = _TokenScores.apply(
        logits.float(), targets, temperature, entropy_grad, own
    )  # type: ignore[no-untyped-call]
    return scores


def token_energies(
    logits: Tensor, targets: Tensor, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return each target's logprob, and the squared norm of its gradient by the logits.

    The gradient is the target's unit vector minus the probabilities, so the norm is ``1 - 2 p +
    sum over v of p_v^2``. Without gradient; arguments as for ``token_scores``.

    Returns:
        (T,) float32 each.
    """
    own = logits.float() if temperature is None else logits.float() / temperature[:, None]
    logprobs = own.log_softmax(-1)
    target_logprobs = logprobs.gather(1, targets[:, None])[:, 0]
    squares = torch.square(logprobs.exp()).sum(-1)
    return target_logprobs, (1.0 - 2.0 * target_logprobs.exp() + squares).clamp_min(0.0)


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: Tensor | None,
        entropy_grad: bool,
        owned: bool,
    ) -> tuple[Tensor, Tensor]:
        target_logprobs = logits.new_empty(len(logits))
        entropy = logits.new_empty(len(logits))
        probabilities = logits if owned else torch.empty_like(logits)
        for rows in _row_blocks(logits):
            own = logits[rows] if temperature is None else logits[rows] / temperature[rows, None]
            logprobs = own.log_softmax(-1)
            target_logprobs[rows] = logprobs.gather(1, targets[rows, None])[:, 0]
            block = torch.exp(logprobs, out=probabilities[rows])
            # A logit of -inf (a padded vocabulary) adds nothing; 0 * -inf would be NaN.
            entropy[rows] = logprobs.clamp_min_(_LOWEST).mul_(block).sum(-1).neg_()
            # Free them before the next block's are made.
            del own, logprobs
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        # Saved this way, checkpointing and offload see it, and a second backward pass is an error.
        ctx.save_for_backward(
            probabilities, targets, temperature, entropy if entropy_grad else None
        )
        return target_logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        gradient, targets, temperature, entropy = ctx.saved_tensors
        if temperature is not None:
            logprob_gradient = logprob_gradient / temperature
            entropy_gradient = entropy_gradient / temperature
        for rows in _row_blocks(gradient):
            # Probabilities p, which become -g p - h (p log p + H p).
            block = gradient[rows]
            surprise = None
            if entropy is not None:
                surprise = torch.xlogy(block, block).addcmul_(block, entropy[rows, None])
            block.mul_(-logprob_gradient[rows, None])
            if surprise is not None:
                block.addcmul_(surprise, entropy_gradient[rows, None], value=-1.0)
            block.scatter_add_(1, targets[rows, None], logprob_gradient[rows, None])
        return gradient, None, None, None, None


def _row_blocks(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of each block."""
    most = BLOCK_BYTES.get(logits.device.type, _OTHER_BLOCK_BYTES)
    step = max(1, most // max(1, 4 * logits.shape[1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))
