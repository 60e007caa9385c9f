"""The training objective: corrected policy loss, divergence from the reference, entropy bonus."""

from __future__ import annotations

from torch import Tensor

from broker.settings.registry import resolve
from learner.algorithm.aggregation import token_weights
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.corrections.base import (
    CorrectionFunction,
    CorrectionInputs,
    interpolate_logprobs,
)
from learner.algorithm.kl import kl_penalty
from learner.algorithm.losses import LOSSES
from learner.algorithm.losses.base import LossTokens, PolicyLoss
from learner.algorithm.losses.ratios import correction_sums, ratio_sums
from learner.algorithm.losses.teacher import sampled_divergence, teacher_sums
from learner.algorithm.teaching import trains_divergence
from learner.backends.models.batch import TokenBatch
from learner.config import AlgorithmSection


class PolicyObjective:
    """The numerator of a loss; the denominator needs the whole batch, see ``aggregation``."""

    def __init__(self, algorithm: AlgorithmSection) -> None:
        self._algorithm = algorithm
        self._loss: PolicyLoss = resolve("losses", algorithm.pg_variant, LOSSES)
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
        tokens = LossTokens(
            logprobs=logprobs,
            old_logprobs=correction.old_logprobs,
            advantages=batch.advantages,
            sequence=batch.sequence,
            num_sequences=batch.num_rows,
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
            penalty = kl_penalty(logprobs, ref, algorithm.kl_estimator)
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
        return (weights * losses).sum(), sums

    def _proximal(self, batch: TokenBatch, logprobs: Tensor, version: int) -> Tensor:
        """Return logprobs at the start of the step, (T,), without gradient."""
        if self._algorithm.prox_logp_method == "interpolate":
            return interpolate_logprobs(
                logprobs.detach(), batch.rollout_logprobs, batch.versions, version
            )
        if batch.proximal_logprobs is None:
            # The step has one update only, so this pass is at its start.
            return logprobs.detach()
        return batch.proximal_logprobs
