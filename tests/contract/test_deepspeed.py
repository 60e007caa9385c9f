"""What only the backend deepspeed has: low precision, checkpointed blocks, rows in packs, one rank
with its optimizer in host memory.
"""

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep, state_of, tensors_of

from learner.backends.models import policy
from rlearner_text.config import ModelSection

pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed")
pytestmark = pytest.mark.timeout(600)
KEYS = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return kit.save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_checkpointed_blocks_and_packed_or_padded_rows_change_nothing(path, stage):
    expected = run(make("torch", path), range(2))
    for options in ({"gradient_checkpointing": True, "packing": "packed"}, {"packing": "padded"}):
        backend = make(f"deepspeed-{stage}", path, **options)
        try:
            modes = {
                type(part).__name__ for part in backend.policy.module.modules() if part.training
            }
            assert modes == (
                {"Qwen3DecoderLayer"} if "gradient_checkpointing" in options else set()
            )
            for one, other in zip(run(backend, range(2)), expected, strict=True):
                assert [one[key] for key in KEYS] == pytest.approx(
                    [other[key] for key in KEYS], rel=1e-5, abs=1e-5
                )
        finally:
            backend.close()


LOW = [
    ("deepspeed-1", 2),
    ("deepspeed-1", 1),
    ("deepspeed-2", 1),
    ("deepspeed-3", 1),
    ("deepspeed-2-offload", 1),
]


@pytest.mark.parametrize(("variant", "ranks"), LOW)
def test_bfloat16_over_float32_weights_resumes_bit_for_bit(tmp_path, variant, ranks):
    path, model = (
        kit.save_model(tmp_path / "model", dtype=torch.bfloat16),
        ModelSection(dtype="bfloat16"),
    )
    reference = make("torch", path, model=model, lr=1e-4)
    run(reference, range(3))
    first = make(variant, path, model=model, lr=1e-4, ranks=ranks)
    try:
        run(first, range(2))
        parts = keep(first, tmp_path / "saved")
        metrics = run(first, [2])
        weights = {name: tensor.clone() for name, tensor in first.weights().items()}
        masters = {
            name: tensor
            for name, tensor in state_of(first).items()
            if name.startswith("optimizer.master.")
        }
    finally:
        first.close()
    expected = state_of(reference)
    assert tensors_of(parts).keys() == expected.keys()
    assert masters.keys() == {name for name in expected if name.startswith("optimizer.master.")}
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32
        if ranks == 1:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-7)
        # slices of other shapes round differently in bfloat16; AdamW's updates hide the gradient's
        # size
        else:
            assert (tensor - expected[name]).abs().mean() < 1e-5, name
    second = make(variant, str(tmp_path / "saved"), model=model, lr=1e-4, ranks=ranks)
    try:
        second.load_state(parts)
        assert run(second, [2]) == metrics
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())
    finally:
        second.close()


@pytest.mark.parametrize("variant", ["deepspeed-2-offload", "deepspeed-3-offload"])
def test_one_rank_alone_whose_logits_are_computed_again_in_pieces(path, variant, monkeypatch):
    reference = make("torch", path)
    monkeypatch.setattr(policy, "_LOGIT_BUDGET", 8 * kit.VOCAB)  # as with a real vocabulary
    alone = make(variant, path, ranks=1)
    try:
        for one, other in zip(run(alone, range(3)), run(reference, range(3)), strict=True):
            assert [one[key] for key in KEYS] == pytest.approx(
                [other[key] for key in KEYS], rel=1e-5, abs=1e-5
            )
        torch.testing.assert_close(
            alone.logprobs(np.arange(9)), reference.logprobs(np.arange(9)), rtol=0, atol=1e-5
        )
        expected = reference.weights()
        assert list(alone.weights()) == list(expected)
        for name, tensor in alone.weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)
    finally:
        alone.close()


def test_a_gradient_that_is_not_finite_changes_nothing(path):
    backend = make("deepspeed-2", path, ranks=1)
    try:
        before = {name: tensor.clone() for name, tensor in backend.weights().items()}
        bad = kit.samples(3, 4)
        bad[0].advantages[bad[0].positions] = np.inf
        backend.forward_backward(bad)
        assert backend.step()["actor/skipped"] == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights().items())
        expected = make("torch", path)
        assert run(backend, [0])[0]["actor/grad_norm"] == pytest.approx(
            run(expected, [0])[0]["actor/grad_norm"], rel=1e-5
        )
    finally:
        backend.close()
