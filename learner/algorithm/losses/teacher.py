"""The divergence of trained tokens from a teacher that has scored some of them."""

from __future__ import annotations

import torch
from torch import Tensor

from learner.algorithm.kl import kl_penalty
from learner.algorithm.losses.distill import candidate_logprobs, distillation_kl, with_rest


def candidate_divergence(
    logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, direction: str
) -> Tensor:
    """Return the divergence over a teacher's likeliest tokens and the rest as one more.

    Args:
        logits: (T, V) of the policy, with gradient.
        top_ids: (T, k) int64.
        top_logprobs: (T, k), NaN where no teacher has scored the token.
        direction: forward, KL(teacher || policy), or reverse.

    Returns:
        (T,) nats, 0 without gradient where there is no teacher.
    """
    has_none = top_logprobs.isnan().any(-1)
    # Any finite distribution: a NaN would reach the gradient of all tokens.
    teacher = torch.where(has_none[:, None], -1e3, top_logprobs)
    policy = candidate_logprobs(logits.float(), top_ids)
    divergence = distillation_kl(policy, with_rest(teacher), direction)
    return torch.where(has_none, 0.0, divergence)


def sampled_divergence(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """Return half the squared log-ratio of each sampled token, (T,), 0 where there is no teacher.

    For tokens sampled from the policy its gradient is that of KL(policy || teacher), see
    ``learner.algorithm.kl``.

    Args:
        logprobs: (T,) under the policy, with gradient.
        teacher_logprobs: (T,), NaN where no teacher has scored the token.
    """
    # A NaN would reach the gradient although it is masked.
    known = torch.where(teacher_logprobs.isnan(), logprobs.detach(), teacher_logprobs)
    return kl_penalty(logprobs, known, "k2")


@torch.no_grad()
def teacher_sums(teacher_logprobs: Tensor, logprobs: Tensor) -> dict[str, Tensor]:
    """Return sums for the metrics: the estimated KL(policy || teacher), and its tokens.

    Args:
        teacher_logprobs: (T,), NaN where no teacher has scored the token.
        logprobs: (T,) under the policy.
    """
    gap = logprobs - teacher_logprobs
    has_teacher = ~gap.isnan()
    return {
        "teacher_kl": torch.where(has_teacher, gap, 0.0).sum(),
        "teacher_tokens": has_teacher.sum(),
    }
