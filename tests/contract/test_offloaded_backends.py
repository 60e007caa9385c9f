"""Training with everything moved off the device between steps is the same bit for bit, and the
memory is free there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import critic_kit
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep, state_of, tensors_of

from broker.weights.memory.staging import FlatBuffer, plan_of
from learner.config import AlgorithmSection
from rlearner_text.config import ModelSection

STEPS = range(3)
KL = AlgorithmSection(kl_coef=0.1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("torch", {}),
    "reference": ("torch", {"algorithm": KL}),
    "bfloat16": ("torch", {"model": ModelSection(dtype="bfloat16")}),
    "lora": ("torch", {"lora": {"rank": 2}, "algorithm": KL}),
    "fsdp2": ("fsdp2", {"algorithm": KL}),  # its reference is whole
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


def state(backend: Any) -> dict[str, torch.Tensor]:
    return {
        **{name: tensor.clone() for name, tensor in backend.weights().items()},
        **state_of(backend),
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def held_bytes(backend: Any) -> int:
    from learner.backends.offload import device_tensors

    worker = backend.worker
    held = device_tensors(worker.models.modules(), [worker.optimizer], worker.device)
    return sum(
        {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in held}.values()
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", CASES)
def test_steps_with_turns_are_the_same_bit_for_bit(path: str, tmp_path: Path, name: str) -> None:
    variant, options = CASES[name]
    plain = make(variant, path, **options)
    expected = run(plain, STEPS)
    expected_state = state(plain)
    plain.close()

    backend, found = make(variant, path, **options), []
    awake = held_bytes(backend)
    assert awake > 0
    for step in STEPS:
        snapshot = backend.snapshot()
        backend.offload(tmp_path)
        assert held_bytes(backend) == 0
        # a checkpoint, while others use the device
        parts = keep(backend, tmp_path / f"step_{step}", snapshot)
        backend.reload()
        assert held_bytes(backend) == awake
        found += run(backend, [step])
        # an offer reads the weights, after which torch may not resize them
        backend.logprobs([1, 2, 3])
        FlatBuffer(plan_of(backend.shapes(), 1.0)).fill(backend.weights())
    assert found == expected
    assert_same(state(backend), expected_state)
    backend.close()

    again = make(
        variant,
        str(tmp_path / "step_2"),
        **options,
        **({"ref_path": path} if name == "lora" else {}),
    )
    written = {
        name: tensor
        for name, tensor in tensors_of(parts).items()
        if name.startswith(("model.", "adapter."))
    }
    found_again = state_of(again)
    assert_same({name: found_again[name] for name in written}, written)
    again.close()


def test_a_critic_moves_with_its_optimizer(path: str, tmp_path: Path) -> None:
    plain, backend = (make("torch", path, algorithm=critic_kit.PPO) for _ in range(2))
    expected = critic_kit.steps(plain, STEPS)
    found = []
    for step in STEPS:
        backend.offload(tmp_path)
        backend.reload()
        found += critic_kit.steps(backend, [step])
    assert found == expected
    assert_same(state(backend), state(plain))


def test_a_step_under_way_stays_on_the_device(path: str, tmp_path: Path) -> None:
    backend = make("torch", path)
    backend.forward_backward(kit.samples(1, 4))
    with pytest.raises(RuntimeError, match="under way"):
        backend.offload(tmp_path)
    backend.discard()
    backend.offload(tmp_path)
    backend.reload()
    assert run(backend, [0]) == run(make("torch", path), [0])
