"""Every loss and correction on a real model, several updates a step, the critic and the adaptive
coefficient.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from checkpoint_kit import load_state, state_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch_backend_kit import backend, gradient, plain_logprobs, sample, samples, save_model

from broker.errors import UserError
from learner.algorithm.corrections import CORRECTIONS
from learner.algorithm.kl import KlCoefficient
from learner.algorithm.losses import LOSSES
from learner.algorithm.packing import split_minibatches
from learner.backends.models.critic import ValueModel, value_losses
from learner.config import AlgorithmSection, CriticSection, TrainSection

few = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Each loss, each correction, and the two together where both look at whole sequences.
SECTIONS = [
    *(
        AlgorithmSection(pg_variant=name, clip_high=0.28, loss_agg_mode="seq-mean-token-mean")
        for name in LOSSES
    ),
    *(AlgorithmSection(correction=name, opsm_delta=0.1) for name in CORRECTIONS),
    AlgorithmSection(pg_variant="gspo", correction="tis", correction_level="sequence"),
    AlgorithmSection(pg_variant="topr", correction="mis", correction_level="geometric"),
    AlgorithmSection(correction="decoupled", prox_logp_method="interpolate"),
]
IDS = [f"{s.pg_variant}-{s.correction}-{s.prox_logp_method}" for s in SECTIONS]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def relative(a, b):
    return float((a - b).norm() / b.norm())


def accumulated(path, batches, algorithm, **rest):
    trainer = backend(path, algorithm=algorithm, **rest)
    for batch in batches:
        trainer.forward_backward(batch)
    return gradient(trainer)


def near(rows, path, spread=0.3):
    """The samples as if a policy close by had sampled them, so that no correction masks everything."""
    model, rng = backend(path).policy.module, np.random.default_rng(0)
    found = []
    for one in rows:
        with torch.no_grad():
            chosen = plain_logprobs(model, one)[0].numpy()
        logprobs = np.zeros(len(one.token_ids), np.float32)
        logprobs[one.positions] = (
            np.minimum(chosen + rng.normal(0, spread, len(chosen)), 0) if spread else chosen
        )
        found.append(dataclasses.replace(one, rollout_logprobs=logprobs))
    return found


@pytest.mark.parametrize("algorithm", SECTIONS, ids=IDS)
@few
@given(seed=st.integers(0, 50), cuts=st.lists(st.integers(0, 9), max_size=4))
def test_the_gradient_does_not_depend_on_the_cutting(path, algorithm, seed, cuts):
    rows = near(samples(seed), path)
    parts = [rows[a:b] for a, b in itertools.pairwise(sorted({0, 9, *cuts}))]
    whole = accumulated(path, [rows], algorithm)
    assert whole.norm() > 0
    assert relative(accumulated(path, parts, algorithm), whole) < 1e-6


@pytest.mark.parametrize("algorithm", SECTIONS, ids=IDS)
def test_masking_the_last_tokens_equals_removing_them(path, algorithm):
    whole, rest = sample(np.random.default_rng(1), 24), near(samples(2, 3), path)
    keep = int(whole.positions[len(whole.positions) // 2]) + 1
    mask = whole.loss_mask.copy()
    mask[keep:] = 0
    fields = ("token_ids", "loss_mask", "rollout_logprobs", "versions", "advantages")
    masked = dataclasses.replace(whole, loss_mask=mask)
    removed = dataclasses.replace(whole, **{name: getattr(whole, name)[:keep] for name in fields})
    trainers = [backend(path, algorithm=algorithm) for _ in range(2)]
    for trainer, one in zip(trainers, (masked, removed), strict=True):
        trainer.forward_backward([one, *rest])
    assert torch.equal(gradient(trainers[0]), gradient(trainers[1]))
    assert trainers[0].step() == trainers[1].step()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_on_policy_every_correction_gives_the_gradient_of_none(path, name):
    rows = near(samples(3), path, spread=0)
    expected = accumulated(path, [rows], AlgorithmSection())
    trainer = backend(path, algorithm=AlgorithmSection(correction=name))
    trainer.forward_backward(rows)
    # β is this model's own float32 logprobs, padded another way
    assert relative(gradient(trainer), expected) < 1e-5
    metrics = trainer.step()
    assert metrics["rollout_corr/is_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout_corr/truncated_is_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout_corr/truncated_ess"] == pytest.approx(1, abs=1e-5)
    assert metrics["rollout_corr/clipped_fraction"] == metrics["rollout_corr/masked_fraction"] == 0


@pytest.mark.parametrize("name", ["decoupled", "tis"])
def test_a_corrected_gradient_is_the_formula(path, name):
    # With one update θ = p: the gradient of -min(p/β, 2) A θ/p at θ = p, token by token, written
    # out.
    rows = near(samples(4), path, spread=1.0)
    model = backend(path).policy.module
    total, count, clipped = 0.0, 0, 0
    for one in rows:
        new, _ = plain_logprobs(model, one)
        weight = torch.exp(new.detach() - torch.from_numpy(one.rollout_logprobs[one.positions]))
        clipped += int((weight > 2).sum())
        total = (
            total
            - (
                weight.clamp_max(2.0)
                * torch.from_numpy(one.advantages[one.positions])
                * (new - new.detach()).exp()
            ).sum()
        )
        count += len(new)
    expected = torch.cat(
        [g.flatten() for g in torch.autograd.grad(total / count, list(model.parameters()))]
    )
    trainer = backend(path, algorithm=AlgorithmSection(correction=name, correction_high=2.0))
    trainer.forward_backward(rows)
    assert clipped > 0
    assert relative(gradient(trainer) / count, expected) < 1e-5
    metrics = trainer.step()
    assert metrics["rollout_corr/clipped_fraction"] == pytest.approx(clipped / count)
    assert metrics["rollout_corr/is_mean"] > metrics["rollout_corr/truncated_is_mean"]


def with_proximal(rows, proximal):
    return [
        dataclasses.replace(one, proximal_logprobs=column)
        for one, column in zip(rows, proximal, strict=True)
    ]


def test_interpolation_knows_the_version(path):
    # Version 0, sampled by 0: p = β, so nothing is corrected although the logprobs differ.
    rows = near(samples(5), path)
    interpolated = AlgorithmSection(correction="tis", prox_logp_method="interpolate")
    expected = accumulated(path, [rows], AlgorithmSection(pg_variant="ppo"))
    assert relative(accumulated(path, [rows], interpolated), expected) < 1e-6
    # One step later (without samples, so that no weight has moved) v_β lags by one: α = 1/2, p/β =
    # sqrt(θ/β).
    trainer = backend(path, algorithm=interpolated)
    trainer.step()
    trainer.forward_backward(rows)
    theta = [plain_logprobs(trainer.policy.module, one)[0].detach().numpy() for one in rows]
    raw = np.concatenate(
        [t - one.rollout_logprobs[one.positions] for t, one in zip(theta, rows, strict=True)]
    )
    assert trainer.step()["rollout_corr/is_mean"] == pytest.approx(np.exp(raw / 2).mean(), rel=1e-5)


# ----------------------------------------------------------------------------------------------------------
# updates


def test_one_update_at_once_is_the_streamed_step(path):
    rows, trainers = samples(6), [backend(path) for _ in range(2)]
    trainers[0].forward_backward(rows)
    streamed, whole = trainers[0].step(), trainers[1].update(rows)
    for name, tensor in trainers[0].weights().items():
        assert torch.equal(tensor, trainers[1].weights()[name])
    assert whole == pytest.approx(streamed | {"actor/num_updates": 1.0})


def test_minibatches_cover_each_sample_once_in_a_reproducible_order():
    rows = samples(7, 10)
    parts = split_minibatches(rows, 3, (0, 4, 1))
    assert [len(part) for part in parts] == [4, 3, 3]
    assert sorted(id(one) for part in parts for one in part) == sorted(id(one) for one in rows)
    assert split_minibatches(rows, 3, (0, 4, 1)) == parts
    assert split_minibatches(rows, 3, (0, 5, 1)) != parts
    assert split_minibatches(rows, 1, (0, 0, 0)) == [rows]
    assert [len(part) for part in split_minibatches(rows[:2], 3, (0, 0, 0))] == [1, 1]
    assert split_minibatches([], 3, (0, 0, 0)) == [[]]


def test_epochs_and_minibatches_are_that_many_updates_of_plain_steps(path):
    rows = samples(8, 6)
    algorithm = AlgorithmSection(num_epochs=2, num_minibatches=3)
    trainer, by_hand = backend(path, algorithm=algorithm), backend(path)
    metrics = trainer.update(rows)
    for epoch in range(2):
        for part in split_minibatches(rows, 3, (0, 0, epoch)):
            by_hand.forward_backward(part)
            by_hand.step()
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, by_hand.weights()[name])
    assert metrics["actor/num_updates"] == 6
    assert metrics["actor/num_rows"] == 6  # of one pass
    assert trainer.version == 1


def test_the_proximal_policy_stays_that_of_the_steps_start(path):
    # Two updates with the same samples: after the first, θ has moved away from p, and only p/β, not
    # θ/β, is the weight.
    rows = near(samples(9, 4), path)
    algorithm = AlgorithmSection(correction="tis", num_epochs=2)
    trainer = backend(path, algorithm=algorithm, train=TrainSection(lr=1e-2, device="cpu"))
    told = trainer.score(rows)
    for one, scores in zip(rows, told, strict=True):
        expected = plain_logprobs(trainer.policy.module, one)[0].detach().numpy()
        assert scores.logprobs == pytest.approx(expected, abs=2e-6)
        assert (scores.kl, scores.values) == (None, None)
    columns = []
    for one, scores in zip(rows, told, strict=True):
        column = np.zeros(len(one.token_ids), np.float32)
        column[one.positions] = scores.logprobs
        columns.append(column)
    metrics = trainer.update(with_proximal(rows, columns))
    raw = np.concatenate(
        [
            s.logprobs - one.rollout_logprobs[one.positions]
            for s, one in zip(told, rows, strict=True)
        ]
    )
    assert metrics["rollout_corr/is_mean"] == pytest.approx(np.exp(raw).mean(), rel=1e-4)
    assert metrics["actor/ppo_kl"] != 0  # θ moved between the updates


def test_the_schedule_counts_steps_not_updates(path):
    train = TrainSection(lr=1.0e-3, lr_schedule="linear", steps=4, device="cpu")
    trainer = backend(path, train=train, algorithm=AlgorithmSection(num_minibatches=3))
    assert [trainer.update(samples(10))["actor/lr"] for _ in range(3)] == pytest.approx(
        [1e-3, 0.75e-3, 0.5e-3]
    )


# ---------------------------------------------------------------------------------------------------------------
# kl


def test_the_adaptive_coefficient_by_hand():
    # kl twice the target: error cut to 0.2, 50 of 100 sequences: times 1.1. At 0.9 of it: times 1 -
    # 0.1 * 0.5.
    coefficient = KlCoefficient(0.1, target=0.01, horizon=100.0)
    coefficient.update(0.02, 50)
    assert coefficient.value == pytest.approx(0.11)
    coefficient.update(0.009, 50)
    assert coefficient.value == pytest.approx(0.1045)
    fixed = KlCoefficient(0.1)
    fixed.update(5.0, 50)
    assert fixed.value == 0.1


def test_kl_in_the_reward_leaves_the_loss_alone(path, tmp_path):
    other = save_model(tmp_path / "other", seed=1)
    algorithm = AlgorithmSection(
        kl_coef=0.5, kl_placement="reward", kl_estimator="k1", kl_target=1e-3, kl_horizon=90.0
    )
    rows = samples(11)
    trainer = backend(path, algorithm=algorithm, ref_path=other)
    told = trainer.score(rows)
    reference = backend(other).policy.module
    for one, scores in zip(rows, told, strict=True):
        ref = plain_logprobs(reference, one)[0].detach().numpy()
        assert scores.kl == pytest.approx(scores.logprobs - ref, abs=4e-6)
    metrics = trainer.update(rows)
    mean = float(np.concatenate([scores.kl for scores in told]).mean())
    assert metrics["actor/reward_kl"] == pytest.approx(mean)
    assert metrics["actor/kl_coef"] == 0.5
    assert "actor/kl_loss" not in metrics
    assert trainer.kl_coef == pytest.approx(
        0.5 * (1 + np.clip(mean / 1e-3 - 1, -0.2, 0.2) * 9 / 90)
    )
    plain = backend(path)
    plain.update(rows)
    for name, tensor in trainer.weights().items():
        assert torch.equal(tensor, plain.weights()[name])
    resumed = backend(path, algorithm=algorithm, ref_path=other)
    load_state(resumed, state_of(trainer))
    assert resumed.kl_coef == trainer.kl_coef


# -----------------------------------------------------------------------------------------------------------
# critic


def test_value_losses_by_hand():
    # V 1, V_old 0.5, R 2: (1 - 2)^2 = 1; clipped to 0.7: 1.69 is worse: 0.845. V 1, R 0: 1 and
    # 0.49: 0.5. Unclipped: 0.5 both.
    values, old, returns = (
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([2.0, 0.0]),
    )
    losses, clipped = value_losses(values, old, returns, 0.2)
    assert losses.tolist() == pytest.approx([0.845, 0.5])
    assert clipped.tolist() == [True, False]
    losses, clipped = value_losses(values, old, returns, None)
    assert losses.tolist() == [0.5, 0.5]
    assert not clipped.any()


def test_values_are_clipped_around_the_steps_start():
    # Once beyond the clip the gradient ends: V may not move further towards R within this step.
    values = torch.tensor([0.8], requires_grad=True)
    value_losses(values, torch.tensor([0.5]), torch.tensor([2.0]), 0.2)[0].sum().backward()
    assert values.grad.item() == 0


CRITIC = AlgorithmSection(
    adv_estimator="gae", critic=CriticSection(enabled=True, lr=1e-2, clip=None)
)


def targeted(rows, trainer, target):
    """Samples whose every return is a function of the token that is trained: what a critic can only
    learn from the model's states.
    """
    found = []
    for one, scores in zip(rows, trainer.score(rows), strict=True):
        values, returns = (
            np.zeros(len(one.token_ids), np.float32),
            np.zeros(len(one.token_ids), np.float32),
        )
        values[one.positions], returns[one.positions] = (
            scores.values,
            [target(one, position) for position in one.positions],
        )
        found.append(dataclasses.replace(one, values=values, returns=returns))
    return found


def test_the_critic_starts_at_zero_and_learns_its_targets(path):
    trainer, rows = backend(path, algorithm=CRITIC), samples(12)
    assert all(not scores.values.any() for scores in trainer.score(rows))
    losses = []
    for _ in range(40):
        metrics = trainer.update(
            targeted(rows, trainer, lambda one, position: one.token_ids[position - 1] % 2)
        )
        losses.append(metrics["critic/vf_loss"])
    assert losses[-1] < 0.2 * losses[0]
    assert metrics["critic/vf_explained_var"] > 0.5
    assert metrics["critic/vf_clipfrac"] == 0


def test_the_first_value_loss_is_half_the_mean_square_of_the_targets(path):
    trainer, rows = backend(path, algorithm=CRITIC), samples(13)
    metrics = trainer.update(targeted(rows, trainer, lambda one, position: 3.0))
    assert metrics["critic/vf_loss"] == pytest.approx(4.5)
    assert metrics["critic/vpred_mean"] == 0
    assert metrics["critic/vf_explained_var"] == 0  # targets that are all alike have no variance
    assert metrics["critic/lr"] == pytest.approx(1e-2)


def test_the_critics_gradient_does_not_depend_on_the_cutting(path):
    # Few tokens a slice or many: the same values after the update, to float32.
    rows, moved = samples(14), []
    for tokens in (30, 4096):
        train = TrainSection(lr=1e-3, device="cpu", micro_batch_tokens=tokens)
        trainer = backend(path, algorithm=CRITIC, train=train)
        trainer.update(targeted(rows, trainer, lambda one, position: 1.0))
        moved.append(np.concatenate([scores.values for scores in trainer.score(rows)]))
    assert moved[0] == pytest.approx(moved[1], abs=1e-5)


def test_warm_up_trains_the_critic_alone(path):
    section = CRITIC.model_copy(update={"critic": CriticSection(enabled=True, warmup_steps=1)})
    trainer, rows = backend(path, algorithm=section), samples(15)
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    metrics = trainer.update(targeted(rows, trainer, lambda one, position: 1.0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())
    assert metrics["actor/num_updates"] == 0
    assert "actor/pg_loss" not in metrics
    assert trainer.version == 1
    assert trainer.update(targeted(rows, trainer, lambda one, position: 1.0))["actor/pg_loss"] != 0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def test_a_resumed_critic_goes_on_bit_for_bit(path):
    rows, algorithm = samples(16), CRITIC.model_copy(update={"num_minibatches": 2})
    trainer = backend(path, algorithm=algorithm)
    trainer.update(targeted(rows, trainer, lambda one, position: 1.0))
    resumed = backend(path, algorithm=algorithm)
    resumed.policy.module.load_state_dict(trainer.policy.module.state_dict())
    load_state(resumed, state_of(trainer))
    lines = [
        one.update(targeted(rows, one, lambda row, position: 1.0)) for one in (trainer, resumed)
    ]
    assert lines[0] == lines[1]
    for a, b in zip(trainer.score(rows), resumed.score(rows), strict=True):
        assert np.array_equal(a.values, b.values)


def test_a_state_without_a_critic_is_refused(path):
    with pytest.raises(UserError, match="critic belongs to another model, or there is none"):
        load_state(backend(path, algorithm=CRITIC), state_of(backend(path)))


def test_the_critics_state_fits_another_process(path):
    trainer = backend(path, algorithm=CRITIC)
    assert isinstance(trainer.worker.models.critic, ValueModel)
    state = state_of(trainer)
    assert all(
        isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
        for tensor in state.values()
    )
    assert any(name.startswith("critic.weight.trunk.") for name in state)
