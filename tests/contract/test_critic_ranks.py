"""A critic beside adapters on two ranks: the losses and values of one process, whether the policy
is whole on each rank or sharded.
"""

import os

import pytest
import torch
from backend_kit import kit, make
from checkpoint_kit import keep, state_of, tensors_of
from critic_kit import PPO, agree, steps

pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")


def start(name, path, first=None):
    return make(name, path, algorithm=PPO, ref_path=first, lora={"rank": 4})


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [
        "fsdp2",
        pytest.param(
            "ddp",
            marks=pytest.mark.skipif("RL_OPTIONS" not in os.environ, reason="make test-options"),
        ),
    ],
)
def test_a_critic_on_two_ranks(tmp_path, name):
    path = kit.save_model(tmp_path / "first")
    alone = start("torch", path)
    steps(alone, range(2))
    parts = keep(alone, tmp_path / "checkpoint")
    pair = start(name, str(tmp_path / "checkpoint"), path)
    try:
        pair.load_state(parts)  # the others take the critic from rank 0
        before = state_of(pair)
        assert all(
            torch.equal(before[key], value)
            for key, value in tensors_of(parts).items()
            if key.startswith("critic.")
        )
        agree(steps(pair, range(2, 4)), steps(alone, range(2, 4)))
        first, second = state_of(pair), state_of(alone)
        for key in (key for key in second if key.startswith("critic.weight.")):
            torch.testing.assert_close(first[key], second[key], rtol=0, atol=1e-5)
        assert any(name.startswith("adapter.base_model.model.") for name in second)
        for name in (name for name in second if name.startswith("adapter.")):
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)
        for name, tensor in alone.weights().items():  # merged ones
            torch.testing.assert_close(pair.weights()[name], tensor, rtol=0, atol=1e-5)
    finally:
        pair.close()
