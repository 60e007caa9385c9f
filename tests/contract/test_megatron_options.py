"""A critic, compiled layers and offload with the backend megatron: in every layout of two ranks as
one process of torch has them.
"""

import os
import shutil
import signal
import threading

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep
from critic_kit import PPO, agree, steps, whole
from safetensors.torch import load_file, save_file

from broker.errors import ConfigError
from learner.backends import activation_offload
from learner.backends.ranks import children as children_module
from learner.backends.ranks.leader import RankExitedError
from learner.config import AlgorithmSection
from rlearner_text.config import ModelSection

pytest.importorskip("megatron.core", reason="megatron is not installed: make test-megatron")
pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")
pytestmark = pytest.mark.timeout(900)
LAYOUTS = ("megatron", "megatron-tp2", "megatron-pp2")  # the first: two copies
CLOSE = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


@pytest.fixture(scope="module")
def with_critic(path):
    """The torch backend's first steps."""
    return steps(make("torch", path, algorithm=PPO), range(5))


def close(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        assert [one[name] for name in CLOSE] == pytest.approx(
            [wanted[name] for name in CLOSE], rel=1e-5, abs=1e-5
        )


def same(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("variant", LAYOUTS)
def test_weights_that_are_not_finite_are_refused(path, tmp_path, variant, layer):
    """Another rank than 0 has the second layer in a pipeline, and the last row in halves."""
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    file = broken / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.{layer}.mlp.up_proj.weight"
    tensors[name][-1, 3] = float("nan")
    last = len(tensors[name]) - 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=rf"{name} holds nan at \[{last}, 3\]") as error:
        make(variant, str(broken))
    assert (error.value.key, error.value.value) == ("model.path", str(broken))


@pytest.mark.parametrize("variant", LAYOUTS)
def test_a_critic_and_an_offloaded_optimizer_learn_and_resume_as_in_one_process(
    path, with_critic, tmp_path, variant
):
    held = make(variant, path, algorithm=PPO)
    try:
        found = steps(held, range(5))
        last = whole(held)
        values = [one.values for one in held.score(kit.samples(9))]
    finally:
        held.close()
    agree(found, with_critic)
    assert abs(with_critic[4]["critic/vf_explained_var"]) > 0.01

    offloaded = make(variant, path, algorithm=PPO, optimizer_offload=True)
    try:
        for optimizer in (offloaded.worker.optimizer, offloaded.worker.models.critic.optimizer):
            assert optimizer._copied == list(optimizer._masters)
        assert steps(offloaded, range(2)) == found[:2]
        parts = keep(offloaded, tmp_path)
        assert steps(offloaded, range(2, 5)) == found[2:]
        same(whole(offloaded), last)
    finally:
        offloaded.close()

    alone = make("torch", str(tmp_path), algorithm=PPO, ref_path=path)
    alone.load_state(parts)
    agree(steps(alone, range(2, 5)), with_critic[2:])
    for one, other in zip(values, alone.score(kit.samples(9)), strict=True):
        np.testing.assert_allclose(one, other.values, rtol=0, atol=1e-5)

    again = make(variant, str(tmp_path), algorithm=PPO, ref_path=path, optimizer_offload=True)
    try:
        again.load_state(parts)
        assert steps(again, range(2, 5)) == found[2:]
        same(whole(again), last)
    finally:
        again.close()


def test_a_critic_beside_adapters_on_two_copies_of_two_ranks(path, monkeypatch):
    expected = steps(make("torch", path, algorithm=PPO, lora={"rank": 4}), range(3))
    lines, seen = [], threading.Event()
    monkeypatch.setattr(
        children_module, "exit_at_once", lambda line: (lines.append(line), seen.set())
    )
    backend = make(
        "megatron-tp2", path, ranks=4, algorithm=PPO, lora={"rank": 4}, optimizer_offload=True
    )
    try:
        agree(steps(backend, range(3)), expected)
        os.kill(backend._ranks.leader.ranks.processes[1].pid, signal.SIGKILL)
        assert seen.wait(10)
        with pytest.raises(RankExitedError, match="rank 2"):
            steps(backend, [3])
    finally:
        backend.close()
    (line,) = lines
    assert line.startswith("rank 2 (pid ")
    assert "ended by SIGKILL; so does the learner" in line


@pytest.mark.parametrize("variant", ["megatron-tp2", "megatron-pp2"])
def test_bfloat16_with_an_offloaded_optimizer_makes_the_same_steps(tmp_path, variant):
    path, model = (
        kit.save_model(tmp_path / "model", dtype=torch.bfloat16, kv_heads=2),
        ModelSection(dtype="bfloat16"),
    )
    ends = []
    for wanted in (False, True):
        backend = make(variant, path, model=model, optimizer_offload=wanted)
        try:
            ends.append((run(backend, range(3)), whole(backend)))
        finally:
            backend.close()
    assert ends[0][0] == ends[1][0]
    same(ends[1][1], ends[0][1])
    assert any(name.startswith("optimizer.master.") for name in ends[0][1])


@pytest.mark.parametrize(
    ("variant", "ranks", "more"),
    [
        ("megatron", 1, {}),
        ("megatron", 1, {"lora": {"rank": 4}}),
        ("megatron-tp2", 2, {"lora": {"rank": 4}}),
        ("megatron-pp2", 2, {}),
        ("megatron-pp2", 2, {"gradient_checkpointing": True}),
    ],
)
def test_offloaded_activations_make_the_same_steps_and_weights_stay(
    path, monkeypatch, variant, ranks, more
):
    """Of a pipeline this process has the first stage, which keeps several slices."""
    expected = run(make("torch", path, **more), range(2))
    backend = make(variant, path, ranks=ranks, activation_offload=True, **more)
    trained, _ = backend.policy.trained_parameters()
    weights = {
        one.untyped_storage().data_ptr()
        for one in (*backend.policy.model.parameters(), *trained.values())
    }
    leaves, moved = activation_offload._is_offloaded, []

    def as_on_a_gpu(tensor):
        class Large:
            is_cuda, nbytes, _base = True, 1 << 20, tensor._base

        assert not leaves(tensor)  # on a CPU nothing is moved
        moves = not isinstance(tensor, torch.nn.Parameter) and leaves(Large())
        if moves:
            assert tensor.untyped_storage().data_ptr() not in weights
            moved.append(tensor.nbytes)
        return moves

    monkeypatch.setattr(activation_offload, "_is_offloaded", as_on_a_gpu)
    try:
        close(run(backend, range(2)), expected)
        assert sum(moved) > 5e4  # also of checkpointed layers what enters them: 128 bytes a token
        count = len(moved)
        backend.score(kit.samples(9))
        assert len(moved) == count  # a pass without gradient keeps nothing
    finally:
        backend.close()


@pytest.mark.filterwarnings("default")  # torch warns in its own compiler
@pytest.mark.parametrize(
    ("variant", "ranks", "more"),
    [
        ("megatron", 1, {"activation_offload": True}),
        ("megatron-tp2", 2, {"optimizer_offload": True}),
        (
            "megatron-tp2",
            2,
            {"packing": "padded", "lora": {"rank": 4}, "gradient_checkpointing": True},
        ),
        ("megatron-pp2", 2, {"gradient_checkpointing": True}),
    ],
)
def test_compiled_layers_make_the_same_steps(path, variant, ranks, more):
    algorithm = AlgorithmSection(kl_coef=0.2)
    expected = run(
        make(
            "torch", path, algorithm=algorithm, **({"lora": more["lora"]} if "lora" in more else {})
        ),
        range(5),
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    backend = make(variant, path, ranks=ranks, algorithm=algorithm, compile=True, **more)
    try:
        close(run(backend, range(5)), expected)
    finally:
        backend.close()
        torch._dynamo.reset()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # ten pieces of a layer, with and without gradient and adapters; nothing anew for each batch
    assert 0 < graphs < 60


@pytest.mark.filterwarnings("default")
def test_one_layer_is_compiled_for_all(tmp_path):
    """Or a model of many would reach the limit of variants, and the rest stay as it is."""
    graphs = []
    for num in (1, 3):
        path = kit.save_model(tmp_path / str(num), kv_heads=2, num_layers=num)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        backend = make("megatron", path, ranks=1, compile=True)
        try:
            run(backend, [0])
        finally:
            backend.close()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[0] <= graphs[1] <= graphs[0] + 3
