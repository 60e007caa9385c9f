"""Off-policy corrections, by numbers worked out by hand and by what must hold for each."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.settings.registry import resolve
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.corrections.base import CorrectionInputs, interpolate_logprobs
from learner.algorithm.corrections.decoupled import decoupled
from learner.algorithm.corrections.icepop import icepop
from learner.algorithm.corrections.mis import mis
from learner.algorithm.corrections.none import none
from learner.algorithm.corrections.opsm import opsm
from learner.algorithm.corrections.tis import tis
from learner.algorithm.losses.ratios import correction_metrics, correction_sums
from learner.config import AlgorithmSection

some = settings(max_examples=60, deadline=None)
NUMBERS = st.lists(
    st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.integers(0, 3)),
    min_size=1,
    max_size=20,
)
SETTINGS = [
    {"correction_level": level, "mis_estimator": estimator, "correction_mode": mode}
    for level, estimator, mode in itertools.product(
        ("token", "sequence", "geometric"), ("k1", "k2", "k3"), ("truncate", "mask")
    )
]


def facts(ratios, sequence=None, advantages=None, logprobs=None):
    """β is -1 everywhere, p / β as given, θ is p unless given as ratios to β."""
    rollout = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    proximal = rollout + torch.tensor(ratios, dtype=torch.float64).log()
    now = (
        proximal
        if logprobs is None
        else rollout + torch.tensor(logprobs, dtype=torch.float64).log()
    )
    rows = torch.tensor(sequence or [0] * len(ratios))
    values = torch.tensor(advantages or [1.0] * len(ratios), dtype=torch.float64)
    return CorrectionInputs(now, proximal, rollout, values, rows, int(rows.max()) + 1)


def weights(found):
    return found.weights.tolist(), found.clipped.tolist(), found.masked.tolist()


def test_none_leaves_the_ratio_to_the_loss():
    given_facts = facts([2.0, 0.5])
    found = none(given_facts, AlgorithmSection())
    assert weights(found) == ([1.0, 1.0], [False, False], [False, False])
    assert torch.equal(found.old_logprobs, given_facts.rollout_logprobs)


def test_tis_by_hand():
    # C = 2: 3 is cut to 2, 0.1 is left alone.
    found = tis(facts([3.0, 0.1, 1.5]), AlgorithmSection(correction_high=2.0))
    assert weights(found) == (pytest.approx([2.0, 0.1, 1.5]), [True, False, False], [False] * 3)


def test_tis_by_sequence_by_hand():
    # Products: 2 * 2 = 4 cut to 2 at both tokens; 0.5 * 3 = 1.5. Geometric means: 2; sqrt(1.5) =
    # 1.2247449.
    given_facts = facts([2.0, 2.0, 0.5, 3.0], [0, 0, 1, 1])
    found = tis(given_facts, AlgorithmSection(correction_high=2.0, correction_level="sequence"))
    assert weights(found) == (
        pytest.approx([2.0, 2.0, 1.5, 1.5]),
        [True, True, False, False],
        [False] * 4,
    )
    found = tis(given_facts, AlgorithmSection(correction_high=3.0, correction_level="geometric"))
    assert found.weights.tolist() == pytest.approx([2.0, 2.0, 1.2247449, 1.2247449])


def test_decoupled_by_hand():
    # Cap 2: 3 is cut, or its token masked; ratios of the loss are taken against p.
    given_facts = facts([3.0, 0.5])
    found = decoupled(given_facts, AlgorithmSection(correction_high=2.0))
    assert weights(found) == (pytest.approx([2.0, 0.5]), [True, False], [False, False])
    assert torch.equal(found.old_logprobs, given_facts.proximal_logprobs)
    found = decoupled(given_facts, AlgorithmSection(correction_high=2.0, correction_mode="mask"))
    assert weights(found) == (pytest.approx([0.0, 0.5]), [False, False], [True, False])


def test_icepop_by_hand():
    # Within [0.5, 2]: 0.4 and 2.5 count nothing, the rest count p/β.
    found = icepop(
        facts([0.4, 0.6, 1.9, 2.5]), AlgorithmSection(correction_low=0.5, correction_high=2.0)
    )
    assert weights(found) == (
        pytest.approx([0.0, 0.6, 1.9, 0.0]),
        [False] * 4,
        [True, False, False, True],
    )


def test_mis_by_ratio_by_hand():
    # Sequences: 3 * 0.5 = 1.5 stays, 2 * 2 = 4 goes; by token, 3 goes and the twos stay at the
    # bound's edge (2.1); geometric: 1.22, 2.
    given_facts = facts([3.0, 0.5, 2.0, 2.0], [0, 0, 1, 1])
    bounds = {"correction_low": 0.4, "correction_high": 2.1}
    expected = {
        "token": [0.0, 0.5, 2.0, 2.0],
        "sequence": [1.5, 1.5, 0.0, 0.0],
        "geometric": [math.sqrt(1.5)] * 2 + [2.0] * 2,
    }
    for level, values in expected.items():
        assert mis(
            given_facts, AlgorithmSection(correction_level=level, **bounds)
        ).weights.tolist() == pytest.approx(values), level


def test_mis_masks_at_one_level_and_weighs_at_another():
    # The products 1.5 and 4 decide what stays; what stays weighs its token's own ratio.
    given_facts = facts([3.0, 0.5, 2.0, 2.0], [0, 0, 1, 1])
    section = AlgorithmSection(
        correction_level="token", mis_mask_level="sequence", correction_low=0.4, correction_high=2.1
    )
    assert mis(given_facts, section).weights.tolist() == pytest.approx([3.0, 0.5, 0.0, 0.0])
    # By k2 the sums are (log 3)^2 / 2 + (log 2)^2 / 2 = 0.84 and 0.48.
    section = section.model_copy(update={"mis_estimator": "k2", "correction_high": 0.5})
    assert mis(given_facts, section).weights.tolist() == pytest.approx([0.0, 0.0, 2.0, 2.0])


def test_mis_by_divergence_by_hand():
    # Ratios e and 1: k2 = 1/2 and 0; k3 = e - 1 - 1 = 0.7182818 and 0. Sums 0.5, 0.7182818; means
    # 0.25, 0.3591409.
    given_facts = facts([math.e, 1.0])

    def masked(level, estimator, high):
        section = AlgorithmSection(
            correction_level=level, mis_estimator=estimator, correction_high=high
        )
        return mis(given_facts, section).masked.tolist()

    assert masked("token", "k2", 0.49) == [True, False]
    assert masked("token", "k2", 0.51) == [False, False]
    assert masked("token", "k3", 0.71) == [True, False]
    assert masked("token", "k3", 0.72) == [False, False]
    assert masked("sequence", "k2", 0.49) == [True, True]
    assert masked("sequence", "k3", 0.72) == [False, False]
    assert masked("geometric", "k2", 0.24) == [True, True]
    assert masked("geometric", "k2", 0.26) == [False, False]
    assert masked("geometric", "k3", 0.35) == [True, True]
    assert masked("geometric", "k3", 0.36) == [False, False]


def test_opsm_by_hand():
    # Mean of log β - log θ. Sequence 0: (ln 2 + 0)/2 = 0.3466; sequence 1: (-ln 2 + 0)/2 < 0: θ
    # makes it more often than β did. Sequence 2 is as far as sequence 0, but good.
    given_facts = facts(
        [1.0] * 6,
        [0, 0, 1, 1, 2, 2],
        [-1.0, -1.0, -1.0, -1.0, 1.0, 1.0],
        [0.5, 1.0, 2.0, 1.0, 0.5, 1.0],
    )
    assert weights(opsm(given_facts, AlgorithmSection(opsm_delta=0.34)))[0] == [
        0.0,
        0.0,
        1.0,
        1.0,
        1.0,
        1.0,
    ]
    assert not opsm(given_facts, AlgorithmSection(opsm_delta=0.35)).masked.any()


def test_interpolation_by_hand():
    # v_p = 5. v_β = 5: α = 0, p = β. v_β = 4: α = 1/2. v_β = 2: α = 3/4. β = -1, θ = -3: -1, -2,
    # -2.5. A future version counts as 5.
    rollout, now = torch.full((4,), -1.0), torch.full((4,), -3.0)
    assert interpolate_logprobs(
        now, rollout, torch.tensor([5, 4, 2, 6]), 5
    ).tolist() == pytest.approx([-1.0, -2.0, -2.5, -1.0])


def test_figures_by_hand():
    # Weights 2, 0, 1, 1: mean 1, ESS 16 / (4 * 6) = 2/3; one of four cut, one masked.
    found = tis(facts([3.0, 1.0, 1.0, 1.0]), AlgorithmSection())
    masked = torch.tensor([False, True, False, False])
    changed = type(found)(
        found.old_logprobs, torch.where(masked, 0.0, found.weights), found.clipped, masked
    )
    sums = {name: value.item() for name, value in correction_sums(changed).items()}
    assert correction_metrics(sums, 4) == pytest.approx(
        {
            "rollout_corr/truncated_is_mean": 1.0,
            "rollout_corr/truncated_ess": 2 / 3,
            "rollout_corr/clipped_fraction": 0.25,
            "rollout_corr/masked_fraction": 0.25,
        }
    )
    assert correction_metrics({}, 0) == {
        "rollout_corr/clipped_fraction": 0.0,
        "rollout_corr/masked_fraction": 0.0,
    }
    nothing = {"corrected": 0.0, "corrected_squared": 0.0, "corr_clipped": 0.0, "corr_masked": 4.0}
    assert correction_metrics(nothing, 4)["rollout_corr/truncated_ess"] == 0.0


def facts_of(rows, *, on_policy=False):
    rows = sorted(rows, key=lambda row: row[3])
    names = {name: i for i, name in enumerate(sorted({row[3] for row in rows}))}
    proximal, rollout, advantages = (
        torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3)
    )
    rollout = proximal if on_policy else rollout
    return CorrectionInputs(
        proximal,
        proximal,
        rollout,
        advantages,
        torch.tensor([names[row[3]] for row in rows]),
        len(names),
    )


@pytest.mark.parametrize("name", CORRECTIONS)
@some
@given(rows=NUMBERS, choice=st.sampled_from(SETTINGS))
def test_on_policy_every_correction_is_the_identity(name, rows, choice):
    found = resolve("corrections", name, CORRECTIONS)(
        facts_of(rows, on_policy=True), AlgorithmSection(**choice)
    )
    assert (found.weights == 1).all()
    assert not found.clipped.any()
    assert not found.masked.any()
    assert torch.equal(found.old_logprobs, facts_of(rows, on_policy=True).rollout_logprobs)


@pytest.mark.parametrize("name", CORRECTIONS)
@some
@given(rows=NUMBERS, choice=st.sampled_from(SETTINGS))
def test_a_sequence_alone_is_corrected_as_among_others(name, rows, choice):
    correct, whole, section = (
        resolve("corrections", name, CORRECTIONS),
        facts_of(rows),
        AlgorithmSection(**choice),
    )
    together = correct(whole, section)
    for number in range(whole.num_sequences):
        mine = whole.sequence == number
        parts = (
            whole.logprobs[mine],
            whole.proximal_logprobs[mine],
            whole.rollout_logprobs[mine],
            whole.advantages[mine],
        )
        alone = correct(
            CorrectionInputs(*parts, torch.zeros(int(mine.sum()), dtype=torch.long), 1), section
        )
        torch.testing.assert_close(alone.weights, together.weights[mine])
        assert torch.equal(alone.masked, together.masked[mine])


@pytest.mark.parametrize("name", CORRECTIONS)
@some
@given(rows=NUMBERS, choice=st.sampled_from(SETTINGS))
def test_weights_are_finite_bounded_and_zero_exactly_where_masked(name, rows, choice):
    section = AlgorithmSection(**choice)
    found = resolve("corrections", name, CORRECTIONS)(facts_of(rows), section)
    assert torch.isfinite(found.weights).all()
    assert (found.weights >= 0).all()
    assert torch.equal(found.weights == 0, found.masked)
    assert not (found.clipped & found.masked).any()
    if name in ("tis", "decoupled", "icepop"):
        assert (found.weights <= section.correction_high).all()
