"""Computes divergences between a teacher's and a student's next-token distributions.

Forward KL: Hinton et al. (arXiv 1503.02531). Reverse KL for language models: Gu et al., MiniLLM
(arXiv 2306.08543).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

# float32 logprobs cannot resolve a smaller remaining mass.
MIN_REMAINDER: Final = math.log(1e-6)


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``sum_v p_v (log p_v - log q_v)`` over the last dimension, in nats, 0 if p_v is 0."""
    has_no_mass = log_p == -math.inf
    gap = torch.where(has_no_mass, 0.0, log_p - log_q)
    return (log_p.exp() * gap).sum(-1)


def distillation_kl(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """Return KL(teacher || student) if ``forward`` (mode-covering), KL(student || teacher) if not.

    Args:
        student: (T, N) log-probabilities over the same N outcomes, normalized per row; with
            gradient.
        teacher: (T, N) likewise, without gradient.

    Returns:
        (T,) nats, at least 0.
    """
    if direction == "forward":
        return categorical_kl(teacher, student)
    return categorical_kl(student, teacher)


def candidate_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the student's logprobs of a teacher's k candidates, and of all other tokens together.

    The mass outside the top-k is neither dropped nor spread over the candidates, but kept as one
    more outcome. By the log-sum inequality (Cover and Thomas, Elements of Information Theory,
    theorem 2.7.1) the divergence over the k + 1 outcomes never exceeds the whole one, is 0 for
    equal distributions, and is exact at k = vocabulary; dropping the mass could make it negative,
    and spreading it would teach that the teacher never samples other tokens.

    Args:
        logits: (T, V) of the student.
        ids: (T, k) int64, distinct in each row, k < V.

    Returns:
        (T, k + 1), the rest last.
    """
    total = logits.logsumexp(-1, keepdim=True)
    remainder = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), remainder], -1) - total


def with_rest(logprobs: Tensor) -> Tensor:
    """Append the mass outside a teacher's top k, at least 1e-6: (T, k) to (T, k + 1)."""
    remainder = torch.log1p(-logprobs.double().exp().sum(-1, keepdim=True).clamp(max=1.0))
    return torch.cat([logprobs, remainder.clamp(min=MIN_REMAINDER).to(logprobs.dtype)], -1)
