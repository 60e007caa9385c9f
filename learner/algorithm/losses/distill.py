"""Divergences between a teacher's and a student's next-token distributions.

Forward KL: Hinton et al. (arXiv 1503.02531). Reverse KL for language models: Gu et al., MiniLLM (arXiv 2306.08543).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

SMALLEST_REST: Final = math.log(1e-6)  # a teacher's float32 logprobs cannot say how much less than this is left


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``sum_v p_v (log p_v - log q_v)`` over the last dimension, in nats; what has no mass in p adds nothing."""
    empty = log_p == -math.inf
    gap = torch.where(empty, 0.0, log_p - log_q)
    return (log_p.exp() * gap).sum(-1)


def kl(student: Tensor, teacher: Tensor, direction: str) -> Tensor:
    """``forward``: KL(teacher || student), which covers all that the teacher does; ``reverse``: KL(student || teacher), its mode.

    Args:
        student: (T, N) log-probabilities over the same N outcomes, each row adding up to 1; with gradient.
        teacher: (T, N) likewise, without.

    Returns:
        (T,) nats, at least 0.
    """
    return categorical_kl(teacher, student) if direction == "forward" else categorical_kl(student, teacher)


def candidates(logits: Tensor, ids: Tensor) -> Tensor:
    """The student's view of a teacher's top-k: log-probabilities of the k candidates and of all other tokens together.

    What remains outside the top-k is neither dropped nor spread over the candidates, but kept as one more outcome. By the log-sum
    inequality (Cover and Thomas, Elements of Information Theory, theorem 2.7.1) the divergence over the k + 1 outcomes never
    exceeds the whole one, is 0 for equal distributions, and is exact at k = vocabulary; dropping the mass would make it
    negative at times, and spreading it would teach that the teacher never says anything else.

    Args:
        logits: (T, V) of the student.
        ids: (T, k) int64, distinct in each row, k < V.

    Returns:
        (T, k + 1), the rest last.
    """
    total = logits.logsumexp(-1, keepdim=True)
    rest = logits.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([logits.gather(-1, ids), rest], -1) - total


def with_rest(logprobs: Tensor) -> Tensor:
    """A teacher's top-k with the mass that it leaves as one more outcome: (T, k) to (T, k + 1), the rest at least 1e-6."""
    left = torch.log1p(-logprobs.double().exp().sum(-1, keepdim=True).clamp(max=1.0))
    return torch.cat([logprobs, left.clamp(min=SMALLEST_REST).to(logprobs.dtype)], -1)
