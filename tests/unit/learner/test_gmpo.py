"""GMPO by hand: log-ratios are clipped before the geometric mean."""

import math

import pytest
import torch
from test_policy_losses import tokens

from learner.algorithm.losses.gmpo import gmpo
from learner.config import AlgorithmSection

CLIP = AlgorithmSection(pg_variant="gmpo", clip_low=0.4, clip_high=0.4)


def test_clips_by_hand():
    # Each sequence has a token of ratio 4 or 1/4 (log 1.3863 or -1.3863), and one of 1.
    # 0: r 4, A 1: min(1.3863, 0.4) = 0.4, mean 0.2, s = e^0.2; the clipped token has no gradient.
    # 1: r 4, A -1: max(1.3863, 0.4) = 1.3863, mean ln 2, s = 2; nothing is clipped.
    # 2: r 1/4, A 1: min(-1.3863, -0.4) = -1.3863, mean -ln 2, s = 1/2.
    # 3: r 1/4, A -1: max(-1.3863, -0.4) = -0.4, s = e^-0.2; clipped.
    batch = tokens(
        [4.0, 1.0, 4.0, 1.0, 0.25, 1.0, 0.25, 1.0],
        [1.0, 1.0, -1.0, -1.0, 1.0, 1.0, -1.0, -1.0],
        [0, 0, 1, 1, 2, 2, 3, 3],
    )
    losses, stats = gmpo(batch, CLIP)
    losses.sum().backward()
    up, down = math.exp(0.2), math.exp(-0.2)
    assert losses.tolist() == pytest.approx([-up, -up, 2, 2, -0.5, -0.5, down, down])
    assert batch.logprobs.grad.tolist() == pytest.approx([0, -up, 2, 2, -0.5, -0.5, 0, down])
    assert stats["clipped"] == 2


def test_token_form_is_the_papers_sequence_form():
    # One sequence, A = -1.5: mean over its tokens of the token form against -A exp(mean c), where
    # c is clipped as the paper clips it.
    ratios = [1.1, 0.5, 2.0, 0.9]
    batch = tokens(ratios, [-1.5] * 4)
    gmpo(batch, CLIP)[0].mean().backward()
    other = batch.logprobs.detach().clone().requires_grad_()
    log_ratio = other - batch.old_logprobs
    clipped = torch.maximum(log_ratio, log_ratio.clamp(-0.4, 0.4))
    (1.5 * torch.exp(clipped.mean())).backward()
    torch.testing.assert_close(batch.logprobs.grad, other.grad)
