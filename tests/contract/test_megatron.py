"""What only the backend megatron has: families of models, low precision, checkpointed blocks,
divided vocabularies, layouts.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_kit import kit, make, run
from checkpoint_kit import keep, state_of, tensors_of
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from broker.errors import ConfigError
from learner.backends.models import policy
from learner.config import AlgorithmSection
from rlearner_text.config import ModelSection

pytest.importorskip("megatron.core", reason="megatron is not installed: make test-megatron")
pytestmark = pytest.mark.timeout(600)
KEYS = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")
IDS = np.arange(9)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return kit.save_model(tmp_path_factory.mktemp("model"), kv_heads=2)


def family(folder, name, *, tied):
    sizes = {
        "vocab_size": kit.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    torch.manual_seed(1)
    if name == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
        )
    else:
        rope = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 5e5,
        }
        rope["original_max_position_embeddings"] = 16  # so that a short sequence feels the scaling
        model = LlamaForCausalLM(
            LlamaConfig(**sizes, rms_norm_eps=1e-3, head_dim=16, rope_parameters=rope)
        )
    for parameter_name, parameter in model.named_parameters():  # biases, too, which begin as zeros
        torch.nn.init.normal_(parameter, 1.0 if "norm" in parameter_name else 0.0, 0.15)
    model.save_pretrained(folder, max_shard_size="20KB")  # several files
    (Path(folder) / "tokenizer.json").write_text("{}")
    return str(folder)


def close(found, expected, tolerance=1e-5):
    for one, other in zip(found, expected, strict=True):
        assert [one[key] for key in KEYS] == pytest.approx(
            [other[key] for key in KEYS], rel=tolerance, abs=tolerance
        )


def agree(state, expected):
    """On moments, that is on gradients of a norm of at most 1: AdamW's updates are of like size
    even where a gradient is but noise.
    """
    assert state.keys() == expected.keys()
    for key in (key for key in expected if key.startswith("optimizer.exp_avg")):
        torch.testing.assert_close(state[key], expected[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "tied", "variant", "ranks"),
    [
        ("qwen2", True, "megatron-tp2", 2),
        ("llama", False, "megatron-tp2", 2),
        ("llama", True, "megatron", 1),
        ("qwen2", False, "megatron", 1),
    ],
)
def test_families(tmp_path, name, tied, variant, ranks):
    path = family(tmp_path / "model", name, tied=tied)
    reference, backend = make("torch", path), make(variant, path, ranks=ranks)
    try:
        assert list(backend.weights()) == list(reference.weights())
        assert all(
            torch.equal(tensor, backend.weights()[key])
            for key, tensor in reference.weights().items()
        )
        torch.testing.assert_close(
            backend.logprobs(IDS), reference.logprobs(IDS), rtol=0, atol=1e-5
        )
        close(run(backend, range(3)), run(reference, range(3)))
        agree(state_of(backend), state_of(reference))
        backend.save(tmp_path / "saved")
    finally:
        backend.close()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["architectures"] == [
        f"{name.capitalize()}ForCausalLM"
    ]
    again = make("torch", str(tmp_path / "saved"))
    assert list(again.weights()) == list(reference.weights())
    assert any("bias" in key for key in again.weights()) == (name == "qwen2")


def test_four_ranks_that_divide_both_ways(path):
    expected = run(make("torch", path), range(3))
    backend = make(
        "megatron", path, ranks=4, megatron={"tensor_parallel": 2, "pipeline_parallel": 2}
    )
    try:
        close(run(backend, range(3)), expected)
        state = state_of(backend)
    finally:
        backend.close()
    reference = make("torch", path)
    run(reference, range(3))
    agree(state, state_of(reference))


@pytest.mark.parametrize(
    ("variant", "ranks"), [("megatron", 1), ("megatron-pp2", 2), ("megatron-tp2", 2)]
)
def test_checkpointed_blocks_padded_rows_and_logits_in_pieces_change_nothing(
    path, monkeypatch, variant, ranks
):
    expected = run(make("torch", path), range(2))
    # as with a real vocabulary; ranks that share one must do the same, and the others would not
    # know of it
    if ranks == 1:
        monkeypatch.setattr(policy, "_LOGIT_BUDGET", 8 * kit.VOCAB)
    for options in ({"gradient_checkpointing": True, "packing": "packed"}, {"packing": "padded"}):
        backend = make(variant, path, ranks=ranks, **options)
        try:
            close(run(backend, range(2)), expected)
        finally:
            backend.close()


@pytest.mark.parametrize(
    ("variant", "ranks"), [("megatron", 1), ("megatron-tp2", 2), ("megatron-pp2", 2)]
)
def test_a_reference_an_entropy_bonus_and_temperatures(path, tmp_path, variant, ranks):
    other = kit.save_model(tmp_path / "other", seed=5, kv_heads=2)
    algorithm = AlgorithmSection(kl_coef=0.2, entropy_coef=0.1)
    pair = [
        make("torch", path, algorithm=algorithm, ref_path=other), make(variant, path, algorithm=algorithm,
            ref_path=other, ranks=ranks)
    ]  # fmt: skip
    try:
        figures = []
        for one in pair:
            one.forward_backward(kit.samples(3, 12, temperature=0.7))
            figures.append(one.step())
        close(figures[1:], figures[:1])
        assert figures[1]["actor/kl_loss"] == pytest.approx(figures[0]["actor/kl_loss"], rel=1e-5)
        assert figures[0]["actor/kl_loss"] > 0.1
    finally:
        pair[1].close()


def test_a_divergence_in_the_reward_and_several_updates(path, tmp_path):
    other = kit.save_model(tmp_path / "other", seed=5, kv_heads=2)
    algorithm = AlgorithmSection(
        kl_coef=0.2, kl_placement="reward", num_minibatches=2, num_epochs=2
    )
    pair = [
        make(name, path, algorithm=algorithm, ref_path=other) for name in ("torch", "megatron-pp2")
    ]
    try:
        rows = kit.samples(4, 12)
        for one, wanted in zip(pair[1].score(rows), pair[0].score(rows), strict=True):
            np.testing.assert_allclose(one.kl, wanted.kl, rtol=0, atol=1e-5)
            np.testing.assert_allclose(one.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
        close([pair[1].update(rows)], [pair[0].update(rows)])
    finally:
        pair[1].close()


@pytest.mark.parametrize(
    ("variant", "ranks"), [("megatron", 1), ("megatron-tp2", 2), ("megatron-pp2", 2)]
)
def test_bfloat16_over_float32_weights_resumes_bit_for_bit(tmp_path, variant, ranks):
    path, model = (
        kit.save_model(tmp_path / "model", dtype=torch.bfloat16, kv_heads=2),
        ModelSection(dtype="bfloat16"),
    )
    reference = make("torch", path, model=model, lr=1e-4)
    expected = run(reference, range(3))
    first = make(variant, path, model=model, lr=1e-4, ranks=ranks)
    try:
        metrics = run(first, range(2))
        parts = keep(first, tmp_path / "saved")
        metrics += run(first, [2])
        weights = {name: tensor.clone() for name, tensor in first.weights().items()}
        masters = {
            name: tensor
            for name, tensor in state_of(first).items()
            if name.startswith("optimizer.master.")
        }
    finally:
        first.close()
    assert [one["actor/pg_loss"] for one in metrics] == pytest.approx(
        [one["actor/pg_loss"] for one in expected], abs=0.02
    )
    assert tensors_of(parts).keys() == state_of(reference).keys()
    masters_of_reference = state_of(reference)
    # Torch's norm rounds otherwise than transformers', and AdamW's updates are of like size
    # whatever the gradient's, 3e-4 in all.
    for name, tensor in masters.items():
        assert tensor.dtype == torch.float32
        assert (tensor - masters_of_reference[name]).abs().mean() < 6e-5, name
    second = make(variant, str(tmp_path / "saved"), model=model, lr=1e-4, ranks=ranks)
    try:
        second.load_state(parts)
        assert run(second, [2]) == metrics[2:]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())
    finally:
        second.close()


def test_a_gradient_that_is_not_finite_changes_nothing(path):
    backend = make("megatron-tp2", path)
    try:
        before = {name: tensor.clone() for name, tensor in backend.weights().items()}
        bad = kit.samples(3, 4)
        bad[0].advantages[bad[0].positions] = np.inf
        backend.forward_backward(bad)
        assert backend.step()["actor/skipped"] == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights().items())
    finally:
        backend.close()


def test_what_is_wrong_with_a_model_is_said_before_any_rank_starts(path, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"^train.megatron.tensor_parallel: 4 is not allowed; one of 1, 2: it must divide the model's 2 at",
    ):
        make("megatron", path, ranks=4, megatron={"tensor_parallel": 4})
    with pytest.raises(
        ConfigError,
        match=r"^train.megatron.pipeline_parallel: 3 is not allowed; a divisor of the model's 2 layers",
    ):
        make("megatron", path, ranks=3, megatron={"pipeline_parallel": 3})
    torn = tmp_path / "torn"
    kit.save_model(torn, kv_heads=2)
    config = json.loads((torn / "config.json").read_text())
    (torn / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(
        ConfigError,
        match=r"transformers cannot read its configuration: .*`num_hidden_layers` \(3\) must be equal to",
    ):
        make("megatron", str(torn))
    (torn / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    with pytest.raises(
        ConfigError,
        match=r"11 of its weights are missing, the first is model.layers.2.input_layernorm.weight$",
    ):
        make("megatron", str(torn))
    (torn / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    line = r"its model.layers.0.mlp.gate_proj.weight has shape \(48, 32\), its config.json says \(64, 32\)$"
    with pytest.raises(ConfigError, match=line):
        make("megatron", str(torn))
