"""A weight and rejections at levels of their own, by hand."""

import pytest
import torch
from test_corrections import facts

from learner.algorithm.corrections.base import bypass_proximal, log_ratio
from learner.algorithm.corrections.composed import composed
from learner.config import AlgorithmSection, RejectionSection

# Products 1.5 and 4, geometric means 1.2247 and 2. k3 is r - 1 - ln r: 0.9014, 0.1931; 0.3069 twice.
# k2 is (ln r)^2 / 2: 0.6035, 0.2402; 0.2402 twice.
FACTS = facts([3.0, 0.5, 2.0, 2.0], [0, 0, 1, 1])


def correct(*rejections, **settings):
    section = AlgorithmSection(
        correction="composed",
        rejections=[RejectionSection(**rejection) for rejection in rejections],
        **settings,
    )
    return composed(FACTS, section)


def test_token_weights_with_sequences_rejected():
    found = correct({"level": "geometric", "high": 1.5}, correction_high=2.0)
    assert found.weights.tolist() == pytest.approx([2.0, 0.5, 0.0, 0.0])
    assert found.clipped.tolist() == [True, False, False, False]
    assert found.masked.tolist() == [False, False, True, True]


def test_sequence_weights_with_tokens_rejected():
    # 1.5 and 4, cut to 2; k2 above 0.5 rejects the first token alone.
    found = correct(
        {"level": "token", "estimator": "k2", "high": 0.5},
        correction_level="sequence",
        correction_high=2.0,
    )
    assert found.weights.tolist() == pytest.approx([0.0, 1.5, 2.0, 2.0])
    assert found.clipped.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        ({"level": "token", "low": 0.6, "high": 2.5}, [0, 0, 1, 1]),
        ({"level": "sequence", "low": 0.1, "high": 2.0}, [1, 1, 0, 0]),
        ({"level": "max", "estimator": "k3", "high": 0.5}, [0, 0, 1, 1]),
        # 0.9014 + 0.1931 = 1.0945, and twice 0.3069 = 0.6137
        ({"level": "sequence", "estimator": "k3", "high": 1.0}, [0, 0, 1, 1]),
        # half of that: 0.5472, 0.3069
        ({"level": "geometric", "estimator": "k3", "high": 0.3}, [0, 0, 0, 0]),
        ({"level": "geometric", "estimator": "k2", "high": 0.43}, [1, 1, 1, 1]),
        ({"level": "geometric", "estimator": "k2", "high": 0.42}, [0, 0, 1, 1]),
    ],
)
def test_criteria_without_a_weight(rejection, kept):
    found = correct(rejection, correction_level="none")
    assert found.weights.tolist() == kept
    assert not found.clipped.any()


def test_all_criteria_must_accept():
    found = correct(
        {"level": "token", "low": 0.6, "high": 5.0},
        {"level": "geometric", "high": 1.5},
        correction_level="none",
    )
    assert found.weights.tolist() == [1.0, 0.0, 0.0, 0.0]


def test_without_a_proximal_policy_the_losss_own_ratio_is_the_weight():
    correction = correct({"level": "geometric", "high": 1.5}, correction_high=2.0)
    rollout = FACTS.rollout_logprobs
    found = bypass_proximal(correction, rollout, loss_has_ratio=True)
    assert found.weights.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert not found.clipped.any()
    assert torch.equal(found.old_logprobs, rollout)
    weighed = bypass_proximal(correction, rollout, loss_has_ratio=False)
    assert weighed.weights.tolist() == pytest.approx([2.0, 0.5, 0.0, 0.0])
    assert torch.equal(weighed.old_logprobs, rollout)


def test_unknown_level():
    with pytest.raises(ValueError, match="max"):
        log_ratio(FACTS, "max")
