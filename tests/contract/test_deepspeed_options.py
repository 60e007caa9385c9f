"""A critic, compiled blocks and offloaded activations with the backend deepspeed: as one process of
torch has them.
"""

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep
from critic_kit import PPO, agree, steps, whole
from torch.multiprocessing.reductions import StorageWeakRef

from learner.backends import activation_offload
from learner.config import AlgorithmSection

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed")
pytestmark = pytest.mark.timeout(600)
STAGES = ("deepspeed-1", "deepspeed-2", "deepspeed-2-offload", "deepspeed-3", "deepspeed-3-offload")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


@pytest.fixture(scope="module")
def with_critic(path):
    """The torch backend's first steps."""
    return steps(make("torch", path, algorithm=PPO), range(5))


@pytest.mark.parametrize("variant", STAGES)
def test_a_critic_on_two_ranks_learns_and_resumes_as_in_one_process(
    path, with_critic, tmp_path, variant
):
    first = make(variant, path, algorithm=PPO)
    try:
        found = steps(first, range(2))
        parts = keep(first, tmp_path)
        found += steps(first, range(2, 5))
        last, offloaded = whole(first), first.worker.models.critic.optimizer._copied
        # the critic's optimizer waits where the policy's does
        assert bool(offloaded) == variant.endswith("offload")
        rows = kit.samples(9)
        values = [one.values for one in first.score(rows)]
    finally:
        first.close()
    agree(found, with_critic)
    assert with_critic[4]["critic/vf_explained_var"] != 0.0

    alone = make("torch", str(tmp_path), algorithm=PPO, ref_path=path)
    alone.load_state(parts)
    agree(steps(alone, range(2, 5)), with_critic[2:])
    for one, other in zip(values, alone.score(rows), strict=True):
        np.testing.assert_allclose(one, other.values, rtol=0, atol=1e-5)

    second = make(variant, str(tmp_path), algorithm=PPO, ref_path=path)
    try:
        second.load_state(parts)
        assert steps(second, range(2, 5)) == found[2:]
        again = whole(second)
        assert again.keys() == last.keys()
        assert all(torch.equal(tensor, last[name]) for name, tensor in again.items())
    finally:
        second.close()


LORA = {"lora": {"rank": 4}}
OPTIONS = [
    ("deepspeed-2", {"activation_offload": True}),
    ("deepspeed-3", {"activation_offload": True}),
    ("deepspeed-3", {"activation_offload": True, **LORA}),
    ("deepspeed-1", {"compile": True}),
    ("deepspeed-3", {"compile": True, "activation_offload": True}),
    ("deepspeed-3-offload", {"compile": True, "gradient_checkpointing": True, **LORA}),
]


@pytest.mark.filterwarnings("default")  # torch warns in its own compiler
@pytest.mark.parametrize(("variant", "options"), OPTIONS)
def test_offloaded_activations_and_compiled_blocks_make_the_same_steps(
    path, monkeypatch, variant, options
):
    if "lora" in options:
        pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")
    algorithm = AlgorithmSection(kl_coef=0.2)
    expected = run(
        make("torch", path, algorithm=algorithm, **(LORA if "lora" in options else {})), range(5)
    )
    torch._dynamo.utils.counters.clear()
    backend = make(variant, path, algorithm=algorithm, **options)
    seen = watch(backend, monkeypatch)
    try:
        found = run(backend, range(5))
    finally:
        backend.close()
    for one, other in zip(found, expected, strict=True):
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5), name
    assert (seen["moved"] > 20) == ("activation_offload" in options)
    assert seen["weights"] == 0
    if variant == "deepspeed-3":
        assert seen["gathered"] > 100
        assert seen["kept"] < seen["gathered"] / 20
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 0 < graphs < 40 if "compile" in options else not graphs
    torch._dynamo.reset()


def watch(backend, monkeypatch):
    """Counts what goes to host memory as if this were a GPU, what is gathered, and what of that is
    there as a backward pass begins.
    """
    seen, gathered, leaves = (
        dict.fromkeys(("moved", "weights", "gathered", "kept"), 0),
        [],
        activation_offload._is_offloaded,
    )
    module, optimizer = backend.policy.module, backend.worker.optimizer
    backward = optimizer.backward
    weights = list(module.parameters())

    def as_on_a_gpu(tensor):
        class Seen:
            is_cuda, nbytes, _base = True, 1 << 20, tensor._base

        if isinstance(tensor, torch.nn.Parameter) or not leaves(Seen()):
            return False
        at = tensor.untyped_storage().data_ptr()
        seen["moved"] += 1
        seen["weights"] += any(
            weight.numel() and weight.untyped_storage().data_ptr() == at for weight in weights
        )
        return True

    def before(part, _):
        here = part.parameters(recurse=hasattr(part, "_z3_leaf"))
        gathered.extend(
            StorageWeakRef(one.untyped_storage()) for one in here if torch.is_grad_enabled()
        )

    def watched(total):
        seen["gathered"] += len(gathered)
        seen["kept"] += sum(not one.expired() for one in gathered)
        gathered.clear()
        backward(total)

    monkeypatch.setattr(activation_offload, "_is_offloaded", as_on_a_gpu)
    monkeypatch.setattr(optimizer, "backward", watched)
    if not optimizer._sharded:
        return seen
    within = {
        id(part)
        for block in module.modules()
        if hasattr(block, "_z3_leaf")
        for part in block.modules()
        if part is not block
    }
    for part in module.modules():
        if id(part) not in within and (hasattr(part, "_z3_leaf") or not list(part.children())):
            part.register_forward_pre_hook(before)  # after DeepSpeed's own
    return seen
