"""The training objective: corrected policy loss, divergence from the reference, entropy bonus."""

from __future__ import annotations

import torch
from torch import Tensor

from broker.settings.registry import resolve
from learner.algorithm.aggregation import token_weights
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.corrections.base import (
    CorrectionFunction,
    CorrectionInputs,
    bypass_proximal,
    interpolate_logprobs,
)
from learner.algorithm.kl import kl_penalty, weighted_penalty
from learner.algorithm.losses import LOSSES
from learner.algorithm.losses.base import LossTokens, PolicyLoss
from learner.algorithm.losses.ratios import correction_sums, ratio_sums
from learner.algorithm.losses.teacher import sampled_divergence, teacher_sums
from learner.algorithm.teaching import trains_divergence
from learner.algorithm.traits import LossTraits, loss_traits
from learner.backends.models.batch import TokenBatch
from learner.config import AlgorithmSection


class PolicyObjective:
    """The numerator of a loss; the denominator needs the whole batch, see ``aggregation``."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._loss: PolicyLoss = resolve("losses", algorithm.pg_variant, LOSSES)
        self._loss_has_ratio = (loss_traits(self._loss) or LossTraits()).ratio
        self._correct: CorrectionFunction = resolve(
            "corrections", algorithm.correction, CORRECTIONS
        )

    def __call__(
        self,
        batch: TokenBatch,
        logprobs: Tensor,
        entropy: Tensor,
        ref: Tensor | None,
        *,
        kl_coef: float,
        version: int,
        divergence: Tensor | None = None,
        observed_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a slice's share of the numerator, with gradient, and sums for the metrics.

        Args:
            batch: T trained tokens and all tokens of their sequences.
            logprobs: (T,) under the policy being trained.
            entropy: (T,) in nats.
            ref: logprobs (T,) under the reference, None to leave the divergence out.
            kl_coef: weight of the divergence.
            version: policy version at the start of the step.
            divergence: (T,) from the teacher's likeliest tokens; None: estimated from the sampled
                ones.
            observed_logprobs: (U,) of ``batch.observed``, under the policy being trained.
        """
        algorithm = self._algorithm
        proximal = self._proximal(batch, logprobs, version)
        inputs = CorrectionInputs(
            logprobs=logprobs.detach(),
            proximal_logprobs=proximal,
            rollout_logprobs=batch.rollout_logprobs,
            advantages=batch.advantages,
            sequence=batch.sequence,
            num_sequences=batch.num_rows,
        )
        correction = self._correct(inputs, algorithm)
        if algorithm.bypass:
            correction = bypass_proximal(
                correction, batch.rollout_logprobs, loss_has_ratio=self._loss_has_ratio
            )
        tokens = LossTokens(
            logprobs=logprobs,
            old_logprobs=correction.old_logprobs,
            advantages=batch.advantages,
            sequence=batch.sequence,
            num_sequences=batch.num_rows,
            selected=batch.selected,
        )
        losses, sums = self._loss(tokens, algorithm)
        losses = correction.weights * losses
        weights = token_weights(algorithm.loss_agg_mode, batch.sequence, batch.num_rows)
        sums = {
            **sums,
            **correction_sums(correction),
            "pg_loss": (weights * losses).sum(),
            "entropy": entropy.sum(),
        }
        sums["ppo_kl"] = (correction.old_logprobs - logprobs).sum()
        sums |= ratio_sums(
            logprobs if algorithm.correction == "none" else proximal, batch.rollout_logprobs
        )
        if ref is not None:
            penalty = self._divergence(batch, logprobs, ref)
            losses = losses + kl_coef * penalty
            sums["kl"] = penalty.sum()
        if batch.teacher_logprobs is not None:
            sums |= teacher_sums(batch.teacher_logprobs, logprobs)
            if trains_divergence(algorithm):
                if divergence is None:
                    divergence = sampled_divergence(logprobs, batch.teacher_logprobs)
                losses = losses + algorithm.distillation.coef * divergence
                sums["teacher_loss"] = divergence.sum()
        if algorithm.entropy_coef:
            losses = losses - algorithm.entropy_coef * entropy
        if batch.observed is not None and observed_logprobs is not None:
            observed = batch.observed.sequence
            losses = losses + algorithm.echo_coef * observation_losses(
                observed_logprobs, observed, batch.sequence, batch.num_rows
            )
            sums["observed"] = torch.tensor(len(observed), device=losses.device)
            sums["observed_loss"] = -observed_logprobs.sum()
        return (weights * losses).sum(), sums

    def _divergence(self, batch: TokenBatch, logprobs: Tensor, ref: Tensor) -> Tensor:
        """Return the estimate of the divergence from the reference, (T,), with gradient."""
        estimator = self._algorithm.kl_estimator
        if self._algorithm.kl_importance:
            return weighted_penalty(logprobs, ref, batch.rollout_logprobs, estimator)
        return kl_penalty(logprobs, ref, estimator)

    def _proximal(self, batch: TokenBatch, logprobs: Tensor, version: int) -> Tensor:
        """Return logprobs at the start of the step, (T,), without gradient; of now with bypass."""
        if self._algorithm.bypass:
            return logprobs.detach()
        if self._algorithm.prox_logp_method == "interpolate":
            return interpolate_logprobs(
                logprobs.detach(), batch.rollout_logprobs, batch.versions, version
            )
        if batch.proximal_logprobs is None:
            # The step has one update only, so this pass is at its start.
            return logprobs.detach()
        return batch.proximal_logprobs


def observation_losses(
    logprobs: Tensor, observed: Tensor, sequence: Tensor, num_sequences: int
) -> Tensor:
    """Return at each trained token the mean cross-entropy of what its sequence observed.

    ECHO's auxiliary loss. Shrivastava et al. (arXiv 2605.24517): ``-sum log p / |O|`` over the
    observed tokens O of a sequence. On each of its trained tokens it is aggregated as the policy
    loss is, so with ``seq-mean-token-mean`` it is the paper's mean over sequences.

    Args:
        logprobs: (U,) of the observed tokens, with gradient.
        observed: (U,) int64, the sequence of each.
        sequence: (T,) int64, the sequence of each trained token.
        num_sequences: number of sequences.

    Returns:
        (T,); 0 in a sequence that observed nothing.
    """
    totals = torch.zeros(num_sequences, dtype=logprobs.dtype, device=logprobs.device)
    counts = torch.bincount(observed, minlength=num_sequences).clamp_min(1)
    means = -totals.index_add(0, observed, logprobs) / counts
    return means[sequence]
