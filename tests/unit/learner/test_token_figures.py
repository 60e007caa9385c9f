"""Entropy and importance ratio per token: what a step records, against each row computed alone; and
their files.
"""

from __future__ import annotations

import stat

import numpy as np
import pytest
import torch
from torch_backend_kit import VOCAB, backend, plain_logprobs, save_model

from broker.contract import wire
from broker.errors import UserError
from learner.algorithm.advantages.grpo import estimate
from learner.algorithm.samples import from_trajectory
from learner.algorithm.token_figures import NO_FIGURES, TokenFigures
from learner.backends.megatron.backend import MegatronBackend
from learner.config import AlgorithmSection, TrainSection
from learner.credit.token_files import TokenFiles, file_of, read_figures
from learner.training import TrainingThread

TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def group(ticket, rewards, rng, *, end="terminated"):
    found = []
    for episode, reward in enumerate(rewards):
        n = int(rng.integers(6, 20))
        mask = (np.arange(n) % 4 > 1).astype(np.uint8)
        mask[0] = episode == 1  # sampled from an empty context, so never trained
        logprobs = np.where(mask, -rng.random(n) * 4 - 0.1, 0)
        at = int(np.flatnonzero(mask)[-1])
        turn = wire.Turn(
            start=at, end=at + 1, reward=reward, valid=True, finish_reason="length", server="s"
        )
        found.append(
            wire.Trajectory(
                episode=episode,
                token_ids=wire.column(rng.integers(0, VOCAB, n), "<i4"),
                loss_mask=wire.column(mask, "|u1"),
                logprobs=wire.column(logprobs, "<f4"),
                version_runs=wire.column([0, int(mask.sum())], "<i4"),
                turns=[turn],
                reward=reward,
                reward_parts={"env": reward},
                success=reward > 0,
                end=end if episode == 0 else "terminated",
            )
        )
    given = {
        "domain": "lake",
        "task_index": 0,
        "min_version": 0,
        "hub": "h",
        "deliveries": 1,
        "pools": [],
    }
    return wire.Group(ticket=ticket, trajectories=found, temperature=TEMPERATURE, **given)


def expected(model, one):
    """Return entropies and log ratios of a trajectory's trained tokens, from one forward pass of it
    alone.
    """
    sample = from_trajectory(
        one, np.zeros(len(one.loss_mask.array())), group=1, temperature=TEMPERATURE
    )
    with torch.no_grad():
        logprobs, entropy = plain_logprobs(model, sample)
    return entropy.numpy(), logprobs.numpy() - sample.rollout_logprobs[sample.positions]


async def train(path, groups, algorithm, **train):
    section = TrainSection(lr=1e-2, device="cpu", micro_batch_tokens=64, **train)
    training = TrainingThread(
        lambda: backend(path, train=section, algorithm=algorithm),
        estimate,
        algorithm,
        record_tokens=True,
    )
    try:
        await training.open()
        for one in groups:
            training.add(one)
        first = await training.finish(0)
        for one in groups:
            training.add(one)
        second = await training.finish(1)
    finally:
        training.close()
    return first, second


@pytest.mark.parametrize("packing", ["packed", "padded"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_epochs": 2},
        {"num_minibatches": 2, "batch_adjust": "copy", "whiten_advantages": True},
    ],
    ids=["as groups arrive", "two passes", "two updates of copied samples"],
)
async def test_a_step_records_what_each_row_alone_gives(path, settings, packing):
    rng = np.random.default_rng(0)
    # the second group has equal rewards and no gradient; the third has an odd number of samples
    groups = [group(4, [0, 1, 1], rng), group(9, [1, 1], rng), group(7, [0, 1], rng)]
    first, second = await train(path, groups, AlgorithmSection(**settings), packing=packing)
    model = backend(path).policy.module
    assert list(first.tokens) == [4, 9, 7]
    checked = 0
    for one in groups:
        figures = first.tokens[one.ticket]
        assert len(figures) == len(one.trajectories)
        for found, trajectory in zip(figures, one.trajectories, strict=True):
            entropy, log_ratio = expected(model, trajectory)
            if "num_minibatches" in settings:  # the second one is measured after an update
                assert found.entropy.shape == entropy.shape
            else:
                np.testing.assert_allclose(found.entropy, entropy, rtol=1e-3, atol=1e-6)
                np.testing.assert_allclose(found.log_ratio, log_ratio, rtol=1e-3, atol=1e-4)
            checked += len(entropy)
    assert checked == sum(
        int(t.loss_mask.array()[1:].sum()) for one in groups for t in one.trajectories
    )
    moved = [
        abs(a.log_ratio - b.log_ratio).max()
        for a, b in zip(first.tokens[4], second.tokens[4], strict=True)
    ]
    assert max(moved) > 0.01  # the second step measured the updated policy


async def test_samples_that_are_masked_have_no_figures(path):
    rng = np.random.default_rng(1)
    one = group(3, [0, 1, 0], rng, end="truncated")
    first, _ = await train(path, [one], AlgorithmSection(mask_truncated=True))
    lengths = [len(found.entropy) for found in first.tokens[3]]
    truncated = [len(expected(backend(path).policy.module, t)[0]) for t in one.trajectories]
    assert 0 in lengths
    assert all(n in (0, other) for n, other in zip(lengths, truncated, strict=True))


def test_who_cannot_record_says_so(path):
    assert backend(path).record_tokens()
    assert not MegatronBackend.records_tokens


def test_a_discarded_step_leaves_nothing_behind(path):
    trainer = backend(path)
    trainer.record_tokens()
    one = group(1, [1, 0], np.random.default_rng(2)).trajectories[0]
    sample = from_trajectory(one, np.ones(len(one.loss_mask.array())), group=1)
    trainer.forward_backward([sample])
    trainer.discard()
    assert trainer.take_recorded() == {}
    trainer.forward_backward([sample])
    assert list(trainer.take_recorded()) == [id(sample)]


# --------------------------------------------------------------------------------------------------------
# files


def figures(*entropies):
    column = np.array(entropies, np.float16)
    return TokenFigures(column, -column)


def test_files_hold_what_was_written_and_are_private(tmp_path):
    files = TokenFiles(tmp_path, 0)
    files.write(1, {5: [figures(0.5, 2.0), NO_FIGURES], 6: [figures(1.0)]})
    files.flush()
    found = read_figures(tmp_path, 1, 5)
    assert [one.entropy.tolist() for one in found] == [[0.5, 2.0], []]
    assert [one.log_ratio.tolist() for one in found] == [[-0.5, -2.0], []]
    assert stat.S_IMODE(file_of(tmp_path, 1).stat().st_mode) == 0o600
    files.close()


def test_a_resumed_learner_removes_the_files_of_steps_that_it_trains_again(tmp_path):
    files = TokenFiles(tmp_path, 0)
    for step in (1, 2, 3):
        files.write(step, {step: [figures(1.0)]})
    files.close()
    TokenFiles(tmp_path, 2).close()
    assert [file_of(tmp_path, step).exists() for step in (1, 2, 3)] == [True, True, False]


def test_reading_says_in_one_line_what_is_missing(tmp_path):
    files = TokenFiles(tmp_path, 0)
    files.write(1, {5: [figures(0.5)]})
    files.close()
    with pytest.raises(
        UserError, match=r"^not recorded for step 2 \(samples.keep, with one rank\)$"
    ):
        read_figures(tmp_path, 2, 5)
    with pytest.raises(UserError, match=r"^not recorded: no step has trained it$"):
        read_figures(tmp_path, 0, 5)
    with pytest.raises(UserError, match=r"^not recorded: step 1 did not train ticket 6$"):
        read_figures(tmp_path, 1, 6)
    whole = file_of(tmp_path, 1).read_bytes()
    for data in (whole[:-3], b"", whole.replace(b"\xa4step", b"\xa4stop")):
        file_of(tmp_path, 1).write_bytes(data)
        with pytest.raises(UserError, match="is damaged: "):
            read_figures(tmp_path, 1, 5)


def test_a_folder_that_cannot_be_written_costs_only_the_figures(tmp_path, caplog):
    files = TokenFiles(tmp_path, 0)
    file_of(tmp_path, 1).parent.write_text("a file in the way")
    for step in (1, 2):
        files.write(step, {5: [figures(0.5)]})
    files.close()
    assert [
        record.getMessage().startswith("entropy and importance ratio") for record in caplog.records
    ] == [True]


def test_positions_skip_the_first_token_and_ratios_stay_finite():
    one = group(1, [1, 0], np.random.default_rng(3)).trajectories[1]
    trained = np.flatnonzero(one.loss_mask.array())[1:]  # position 0 was sampled
    assert one.loss_mask.array()[0] == 1
    count = len(trained)
    found = TokenFigures(
        np.full(count, 0.25, np.float16), np.full(count, np.inf, np.float16)
    ).by_position(one)
    assert list(found) == trained.tolist()
    assert set(found.values()) == {(0.25, float(np.exp(80.0)))}
    assert NO_FIGURES.by_position(one) == {}
