"""A critic, compiled blocks and offloaded activations with the backend deepspeed: as one process of torch has them."""

import numpy as np
import pytest
import torch
from backend_kit import kit, make
from critic_kit import PPO, agree, steps

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


def whole(backend):
    """Copies of weights, moments, and the critic's."""
    found = backend.snapshot()
    return found.weights | {name: tensor for name, tensor in found.state.items() if not name.startswith("rng.")}


@pytest.mark.parametrize("variant", STAGES)
def test_a_critic_on_two_ranks_learns_and_resumes_as_in_one_process(path, with_critic, tmp_path, variant):
    first = make(variant, path, algorithm=PPO)
    try:
        found = steps(first, range(2))
        snapshot = first.snapshot()
        first.save(tmp_path, snapshot.weights)
        found += steps(first, range(2, 5))
        last, offloaded = whole(first), first._critic.optimizer._copied
        assert bool(offloaded) == variant.endswith("offload")  # the critic's optimizer waits where the policy's does
        rows = kit.samples(9)
        values = [one.values for one in first.score(rows)]
    finally:
        first.close()
    agree(found, with_critic)
    assert with_critic[4]["critic/vf_explained_var"] != 0.0

    alone = make("torch", str(tmp_path), algorithm=PPO, ref_path=path)
    alone.load_state(snapshot.state)
    agree(steps(alone, range(2, 5)), with_critic[2:])
    for one, other in zip(values, alone.score(rows), strict=True):
        np.testing.assert_allclose(one, other.values, rtol=0, atol=1e-5)

    second = make(variant, str(tmp_path), algorithm=PPO, ref_path=path)
    try:
        second.load_state(snapshot.state)
        assert steps(second, range(2, 5)) == found[2:]
        again = whole(second)
        assert again.keys() == last.keys()
        assert all(torch.equal(tensor, last[name]) for name, tensor in again.items())
    finally:
        second.close()
