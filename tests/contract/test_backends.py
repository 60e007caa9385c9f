"""What every training backend must do as the torch backend does it. Backends for several ranks run
as two processes.
"""

import dataclasses
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch
from backend_kit import VARIANTS, kit, make, run
from checkpoint_kit import keep, state_of

from learner.backends.ranks import children as children_module
from learner.backends.ranks.leader import RankExitedError
from learner.backends.ranks.messages import deal_slices, pack_sample, unpack_sample
from learner.config import AlgorithmSection

CLOSE = ("actor/pg_loss", "actor/entropy", "actor/ppo_kl", "rollout_corr/kl", "actor/grad_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # tensor parallel divides them
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


@pytest.fixture(scope="module")
def expected(path):
    """Metrics of the torch backend's first steps."""
    return run(make("torch", path), range(5))


def scanty(backend):
    """A step with less than one slice for each rank, and with rows that are only measured."""
    for rows in ([], kit.samples(8, 1), kit.samples(9, 3, advantage=0.0)):
        backend.forward_backward(rows)
    return backend.step()


def close(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name in CLOSE:
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name


# Of whole weights and two moments, which part a rank of two holds; ZeRO keeps float32 copies beside
# the weights that it trains.
HELD = {"fsdp2": 1 / 2, "deepspeed-1": 5 / 6, "deepspeed-2": 5 / 6, "deepspeed-2-offload": 5 / 6}
HELD |= {"deepspeed-3": 2 / 3, "deepspeed-3-offload": 2 / 3}
# Norms (224 of 18,368) lie whole on both ranks, and of 23 tokens each has 12; a pipeline's first
# stage has the embedding and one layer.
HELD |= {
    "megatron-tp2": (224 + (18368 - 224 + 32) / 2) / 18368,
    "megatron-pp2": (736 + 8704 + 96) / 18368,
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", VARIANTS)
def test_backend(path, expected, tmp_path, monkeypatch, name):
    # One life: as the torch backend, a checkpoint in the middle; a second: bit for bit the same
    # from there, then a rank is killed.
    first = make(name, path)
    try:
        held = sum(tensor.numel() for tensor in first.worker.optimizer.tensors() if tensor.ndim)
        # weights and two moments
        total = 3 * sum(tensor.numel() for tensor in first.shapes().values())
        assert held == pytest.approx(HELD.get(name, 1) * total, rel=0.01)
        metrics = run(first, range(2))
        parts = keep(first, tmp_path)
        probe = first.logprobs(np.arange(9))
        scores = first.score(kit.samples(9))
        metrics += run(first, range(2, 4))
        first.forward_backward(kit.samples(77))
        first.discard()
        metrics += run(first, range(4, 5))
        weights = {name: tensor.clone() for name, tensor in first.weights().items()}
    finally:
        first.close()
    close(metrics, expected)

    alone = make("torch", str(tmp_path))  # a checkpoint belongs to no layout
    alone.load_state(parts)
    assert list(alone.weights()) == list(weights)
    torch.testing.assert_close(alone.logprobs(np.arange(9)), probe, rtol=0, atol=1e-6)
    for one, other in zip(scores, alone.score(kit.samples(9)), strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=2e-6)
    close(run(alone, range(2, 5)), expected[2:])

    lines, seen = [], threading.Event()
    monkeypatch.setattr(
        children_module, "exit_at_once", lambda line: (lines.append(line), seen.set())
    )
    second = make(name, str(tmp_path))
    try:
        second.load_state(parts)
        assert run(second, range(2, 5)) == metrics[2:]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())
        close([scanty(second)], [scanty(alone)])
        if name != "torch":
            os.kill(second._ranks.leader.ranks.processes[0].pid, signal.SIGKILL)
            assert seen.wait(10)
            (line,) = lines
            assert line.startswith("rank 1 (pid ")
            assert "ended by SIGKILL; so does the learner" in line
            with pytest.raises(RankExitedError, match="rank 1"):
                run(second, [5])
    finally:
        began = time.monotonic()
        second.close()
        assert time.monotonic() - began < 5


@pytest.mark.timeout(120)
def test_two_ranks_give_the_gradient_of_one_in_every_aggregation(path):
    # A token's weight differs in seq-mean-token-mean alone; the other three differ in the
    # denominator, which is rank 0's to know. no weight moves, and the first moment is the gradient
    frozen = {"lr": 1e-30, "betas": (0.0, 0.999), "max_grad_norm": 0.0}
    for modes in (
        ("token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
        ("seq-mean-token-mean",),
    ):
        pair = make("ddp", path, algorithm=AlgorithmSection(loss_agg_mode=modes[0]), **frozen)
        try:
            for mode in modes:
                alone = make(
                    "torch", path, algorithm=AlgorithmSection(loss_agg_mode=mode), **frozen
                )
                pair._context = dataclasses.replace(
                    pair._context, algorithm=alone._context.algorithm
                )
                gradients = [moments(backend) for backend in (pair, alone)]
                assert gradients[1].norm() > 0.1
                assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-6, (
                    mode
                )
        finally:
            pair.close()


@pytest.mark.timeout(120)
def test_all_ranks_follow_the_rules_of_the_log(path):
    """With the learning rate of a schedule that ends where the log says, a rank's part of the
    weights is as it was.
    """
    found = []
    for steps, follows in ((4, False), (100, True)):
        pair = make("fsdp2", path, lr_schedule="linear", steps=steps)
        try:
            if follows:
                pair.follow_rules(steps=4, seed=0)
            found.append(
                (
                    run(pair, range(3)),
                    {name: tensor.clone() for name, tensor in pair.weights().items()},
                )
            )
        finally:
            pair.close()
    (one, weights), (other, again) = found
    assert [line["actor/lr"] for line in one] == pytest.approx([1e-2, 7.5e-3, 5e-3])
    assert one == other
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def moments(backend):
    """The first moments after one step."""
    run(backend, [3])
    state = state_of(backend)
    return torch.cat(
        [
            tensor.flatten()
            for name, tensor in state.items()
            if name.startswith("optimizer.exp_avg.")
        ]
    )


def test_dealing_by_hand():
    # 9 to rank 0, 7 to rank 1, 5 to rank 1 (7 < 9), 3 to rank 0 (9 < 12), 2 to the lower of 12 and
    # 12.
    assert deal_slices([3, 9, 2, 7, 5], 2) == [[0, 1, 2], [3, 4]]
    assert deal_slices([4], 3) == [[0], [], []]


def test_a_sample_crosses_unchanged():
    one = kit.samples(1, 1, temperature=0.7)[0]
    again = unpack_sample(pack_sample(one))
    for name in ("token_ids", "loss_mask", "rollout_logprobs", "versions", "advantages"):
        assert np.array_equal(getattr(one, name), getattr(again, name))
    assert (again.group, again.temperature, again.values, again.proximal_logprobs) == (
        1,
        0.7,
        None,
        None,
    )
