"""The torch backend's step, metrics, state and files."""

import copy
import dataclasses
import shutil
from collections import Counter

import numpy as np
import pytest
import safetensors.torch
import torch
from checkpoint_kit import load_state, state_of
from torch_backend_kit import VOCAB, backend, gradient, plain_logprobs, samples, save_model
from transformers import AutoModelForCausalLM

from broker.errors import ConfigError, NotFinite, UserError, WireError
from broker.settings.registry import resolve
from learner.backends import BACKENDS
from learner.backends.base import Backend
from learner.backends.optimizer import lr_factor
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from learner.weights.probing import WeightProbe
from rlearner_text.config import ModelSection


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def flat(trainer):
    return torch.cat([tensor.float().flatten() for tensor in trainer.weights().values()])


def on_policy(trainer, rows):
    """The same samples with the rollout logprobs that this policy gives them."""
    changed = []
    for one in rows:
        with torch.no_grad():
            chosen, _ = plain_logprobs(trainer.policy.module, one)
        values = one.rollout_logprobs.copy()
        values[one.positions] = chosen.numpy()
        changed.append(dataclasses.replace(one, rollout_logprobs=values))
    return changed


def test_registered(path):
    assert resolve("backends", "torch", BACKENDS) is TorchBackend
    found: Backend = backend(path)  # mypy checks that it is one
    assert found.vocab_size == VOCAB


def test_metrics_of_a_step_on_its_own_policy(path):
    # Every ratio is 1: the loss is minus the mean advantage, nothing is clipped, nothing has moved.
    trainer = backend(path)
    rows = on_policy(trainer, samples(1))
    trainer.forward_backward(rows[:5])
    trainer.forward_backward(rows[5:])
    metrics = trainer.step()
    tokens = sum(one.num_tokens for one in rows)
    assert metrics["actor/pg_loss"] == pytest.approx(
        -sum(one.advantages[one.positions].sum() for one in rows) / tokens, abs=1e-5
    )
    expected = {
        "actor/ppo_kl": 0.0, "actor/pg_clipfrac": 0.0, "rollout_corr/kl": 0.0, "rollout_corr/k3_kl": 0.0,
        "rollout_corr/is_mean": 1.0,
        "rollout_corr/ess": 1.0, "actor/lr": 1e-3, "actor/skipped": 0.0, "actor/num_tokens": tokens,
        "actor/num_rows": 9,
        "actor/num_input_tokens": sum(one.num_inputs for one in rows),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=2e-6)
    assert metrics["actor/num_padded_tokens"] >= metrics["actor/num_input_tokens"]


def test_clip_fraction_and_ratio_figures_off_policy(path):
    # Rollout logprobs 1 below the policy's: every ratio is e, beyond 1.2. With A > 0 all are
    # clipped, with A < 0 none.
    trainer = backend(path)
    for advantage, clipfrac, loss in ((2.0, 1.0, -2.4), (-2.0, 0.0, 2 * np.e)):
        rows = on_policy(trainer, samples(2, advantage=advantage))
        rows = [dataclasses.replace(one, rollout_logprobs=one.rollout_logprobs - 1) for one in rows]
        trainer.forward_backward(rows)
        metrics = trainer.step()
        assert metrics["actor/pg_clipfrac"] == clipfrac
        assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-5)
        assert metrics["actor/ppo_kl"] == pytest.approx(-1.0, abs=1e-5)
        assert metrics["rollout_corr/kl"] == pytest.approx(-1.0, abs=1e-5)
        assert metrics["rollout_corr/is_mean"] == pytest.approx(np.e, rel=1e-5)
        assert metrics["rollout_corr/ess"] == pytest.approx(1.0, rel=1e-5)
        assert metrics["rollout_corr/k3_kl"] == pytest.approx(np.e - 2, rel=1e-5)


def test_updates_equal_plain_adamw(path):
    # Against torch's unfused AdamW on the gradients divided by the token count and clipped, over
    # three steps with a schedule.
    train = TrainSection(
        device="cpu",
        lr=1e-2,
        steps=3,
        lr_schedule="linear",
        warmup_steps=1,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        max_grad_norm=0.05,
    )
    trainer = backend(path, train=train)
    model = copy.deepcopy(trainer.policy.module)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False)
    for step, lr in enumerate((1e-2, 1e-2, 5e-3)):
        rows = samples(step)
        trainer.forward_backward(rows)
        raw = gradient(trainer)
        metrics = trainer.step()
        grad = raw / sum(one.num_tokens for one in rows)
        norm = float(grad.norm())
        assert norm > 0.05
        assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["actor/lr"] == pytest.approx(lr)
        grad = grad * 0.05 / norm
        offset = 0
        for parameter in parameters:
            parameter.grad = grad[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        expected = torch.nn.utils.parameters_to_vector(parameters)
        torch.testing.assert_close(flat(trainer), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 2, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        # down by a quarter over the four updates left
        ("linear", 2, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466]),  # (1 + cos(k pi / 4)) / 2
        ("linear", 0, [1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
    ],
)
def test_learning_rate_by_hand(schedule, warmup, expected):
    train = TrainSection(steps=6, warmup_steps=warmup, lr_schedule=schedule)
    assert [lr_factor(update, train) for update in range(6)] == pytest.approx(expected)


def test_rules_of_the_log_replace_the_configured_steps_and_seed(path):
    """So a step that is trained again after a change of the settings is the same, bit for bit."""
    algorithm = AlgorithmSection(num_minibatches=2)
    found = []
    for steps, seed, follows in ((10, 1, False), (20, 2, True), (20, 2, False)):
        train = TrainSection(steps=steps, lr=1e-2, lr_schedule="linear", device="cpu")
        trainer = TorchBackend(
            path, train=train, algorithm=algorithm, model=ModelSection(), seed=seed
        )
        if follows:
            trainer.follow_rules(steps=10, seed=1)
        rows = samples(6)
        trainer.update(rows)
        found.append((trainer.update(rows)["actor/lr"], flat(trainer)))
    assert found[0][0] == found[1][0] == pytest.approx(0.009)
    assert found[2][0] == pytest.approx(0.0095)
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(found[0][1], found[2][1])


def test_positive_advantages_raise_the_logprobs(path):
    trainer, rows = (
        backend(path, train=TrainSection(lr=3e-3, device="cpu")),
        samples(3, advantage=1.0),
    )
    first = backend(path).forward_backward(rows)["log_ratio"]
    for _ in range(10):
        trainer.forward_backward(on_policy(trainer, rows))
        trainer.step()
    assert trainer.forward_backward(rows)["log_ratio"] > first + 5


def test_a_resumed_trainer_goes_on_bit_for_bit(path, tmp_path):
    train = TrainSection(lr=1e-2, steps=9, lr_schedule="cosine", device="cpu")
    whole = backend(path, train=train)
    for step in range(2):
        whole.forward_backward(samples(step))
        whole.step()
    whole.save(tmp_path)
    data = safetensors.torch.save(state_of(whole))
    resumed = backend(str(tmp_path), train=train)
    load_state(resumed, safetensors.torch.load(data))
    assert resumed.version == 2
    for step in range(2, 4):
        for trainer in (whole, resumed):
            trainer.forward_backward(samples(step))
        assert whole.step() == resumed.step()
        assert torch.equal(flat(whole), flat(resumed))


def test_state_is_a_copy(path):
    trainer = backend(path)
    trainer.forward_backward(samples(1))
    trainer.step()
    state = state_of(trainer)
    kept = {name: tensor.clone() for name, tensor in state.items()}
    trainer.forward_backward(samples(2))
    trainer.step()
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert not torch.equal(
        state["optimizer.exp_avg.model.norm.weight"],
        state_of(trainer)["optimizer.exp_avg.model.norm.weight"],
    )


def test_state_within_a_step_is_refused(path):
    trainer = backend(path)
    trainer.forward_backward(samples(1))
    with pytest.raises(RuntimeError, match="a step is under way"):
        state_of(trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_discarded_step_leaves_no_trace(path, dtype):
    trainers = [backend(path, model=ModelSection(dtype=dtype)) for _ in range(2)]
    trainers[0].forward_backward(samples(1))
    trainers[0].discard()
    assert state_of(trainers[0])  # no step is under way
    for trainer in trainers:
        trainer.forward_backward(samples(2))
    assert trainers[0].step() == trainers[1].step()
    assert torch.equal(flat(trainers[0]), flat(trainers[1]))


def test_the_state_of_another_model_is_refused_and_changes_nothing(path):
    trainer = backend(path)
    state = state_of(trainer)
    del state["optimizer.exp_avg.model.norm.weight"]
    with pytest.raises(UserError, match=r"another model.*exp_avg\.model\.norm\.weight"):
        load_state(trainer, state)
    state["optimizer.exp_avg.model.norm.weight"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"shape \(3,\), not \(32,\)"):
        load_state(trainer, state)
    assert trainer.version == 0


def test_bfloat16_keeps_master_weights(tmp_path):
    # An update of 1e-5 on weights around 0.15 is far below bfloat16's spacing there (2^-10):
    # without masters nothing would move.
    path = save_model(tmp_path / "model", dtype=torch.bfloat16)
    train, model = TrainSection(lr=1e-5, device="cpu"), ModelSection(dtype="bfloat16")
    trainer = backend(path, train=train, model=model)
    before = flat(trainer)
    for _ in range(40):
        trainer.forward_backward(samples(1, 3, advantage=1.0))
        trainer.step()
    assert {tensor.dtype for tensor in trainer.weights().values()} == {torch.bfloat16}
    moved = (flat(trainer) != before).float().mean().item()
    assert moved > 0.2
    state = state_of(trainer)
    masters = torch.cat([state[f"optimizer.master.{name}"].flatten() for name in trainer.weights()])
    assert 1e-4 < (masters - before).abs().max().item() < 6e-4  # 40 updates of at most about 1e-5

    trainer.save(tmp_path / "saved")
    resumed = backend(str(tmp_path / "saved"), train=train, model=model)
    load_state(resumed, state_of(trainer))
    for one in (trainer, resumed):
        one.forward_backward(samples(2))
        one.step()
    assert all(
        torch.equal(a, b)
        for a, b in zip(state_of(trainer).values(), state_of(resumed).values(), strict=True)
    )


def test_bfloat16_gradients_are_summed_in_float32(tmp_path):
    path = save_model(tmp_path, dtype=torch.bfloat16)
    rows = samples(4, 30)
    many = backend(path, model=ModelSection(dtype="bfloat16"))
    single = [backend(path, model=ModelSection(dtype="bfloat16")) for _ in rows]
    total = torch.zeros(())
    for trainer, one in zip(single, rows, strict=True):
        many.forward_backward([one])
        trainer.forward_backward([one])
        total = total + torch.cat(
            [m.grad.flatten() for m in trainer.worker.optimizer._masters.values()]
        )
    found = torch.cat([m.grad.flatten() for m in many.worker.optimizer._masters.values()])
    assert float((found - total).norm() / total.norm()) < 1e-6


def test_a_gradient_that_is_not_finite_is_skipped(path):
    trainer = backend(path)
    before = flat(trainer)
    bad = samples(5, 2, advantage=1.0)
    bad[0].advantages[bad[0].positions] = np.inf
    trainer.forward_backward(bad)
    metrics = trainer.step()
    assert metrics["actor/skipped"] == 1
    first = next(iter(trainer.weights()))
    assert trainer.take_problem().startswith(f"the gradient of {first} holds nan at [")
    assert trainer.take_problem() == ""
    assert torch.equal(flat(trainer), before)
    trainer.forward_backward(samples(5))
    assert trainer.step()["actor/skipped"] == 0
    assert trainer.take_problem() == ""
    assert torch.isfinite(flat(trainer)).all()


def test_a_weight_that_is_not_finite_is_named_before_the_gradient(path):
    trainer = backend(path)
    name = list(trainer.weights())[4]
    with torch.no_grad():
        trainer.weights()[name].view(-1)[7] = torch.inf
    trainer.forward_backward(samples(5, 2, advantage=1.0))
    assert trainer.step()["actor/skipped"] == 1
    assert trainer.take_problem().startswith(f"the weight {name} holds inf at [")
    with pytest.raises(NotFinite, match=f"the weight {name} holds inf"):
        WeightProbe(trainer, "float32").make()


def test_a_model_that_is_not_finite_is_refused_with_its_file(path, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(path, broken)
    (file,) = broken.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = sorted(tensors)[2]
    tensors[name].view(-1)[0] = torch.nan
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"a model of finite weights: {file.name}: {name} holds nan at \[0"
    ):
        backend(str(broken))


def test_weights_too_large_for_the_dtype_are_refused(path, tmp_path):
    large = tmp_path / "large"
    shutil.copytree(path, large)
    (file,) = large.glob("*.safetensors")
    tensors = safetensors.torch.load_file(file)
    name = sorted(tensors)[2]
    tensors[name].view(-1)[0] = torch.finfo(torch.float32).max
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=rf"{name} holds inf .*only finite values, which do not fit bfloat16"
    ):
        backend(str(large), model=ModelSection(dtype="bfloat16"))


def test_plain_attention_is_set_for_one_call(path):
    trainer = backend(path)
    before = trainer.policy.module.config._attn_implementation
    ids = [index % VOCAB for index in range(30)]
    plain = trainer.plain_logprobs(ids)
    assert trainer.policy.module.config._attn_implementation == before != "eager"
    assert torch.allclose(plain, trainer.logprobs(ids), atol=1e-4)


def test_a_step_without_samples(path):
    trainer = backend(path)
    before = flat(trainer)
    assert trainer.forward_backward([]) == {"tokens": 0, "rows": 0, "inputs": 0}
    metrics = trainer.step()
    assert torch.equal(flat(trainer), before)
    assert all(np.isfinite(list(metrics.values())))
    assert (metrics["actor/num_tokens"], trainer.version) == (0, 1)


def test_rows_without_trained_tokens_do_not_count(path):
    rows = samples(6, 4)
    empty = dataclasses.replace(rows[0], loss_mask=np.zeros_like(rows[0].loss_mask))
    assert backend(path).forward_backward([empty, *rows])["rows"] == 4


def test_probe_logprobs(path):
    trainer = backend(path)
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    found = trainer.logprobs(ids)
    logits = AutoModelForCausalLM.from_pretrained(path)(
        torch.tensor(ids.astype(np.int64))[None]
    ).logits[0]
    expected = torch.stack([logits[i].log_softmax(-1)[ids[i + 1]] for i in range(7)])
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=2e-6)
    assert not found.requires_grad
    assert trainer.logprobs([7]).shape == (0,)


def test_weights_are_live_and_tied_ones_come_once(path):
    trainer = backend(path)
    weights = trainer.weights()
    names = Counter(dict.fromkeys(weights, 1))
    assert names["model.embed_tokens.weight"] == 1
    assert "lm_head.weight" not in weights
    assert sum(tensor.numel() for tensor in weights.values()) == sum(
        p.numel() for p in trainer.policy.module.parameters()
    )
    before = weights["model.norm.weight"].clone()
    trainer.forward_backward(samples(1))
    trainer.step()
    assert not torch.equal(weights["model.norm.weight"], before)


def test_save_is_a_model_that_transformers_loads(path, tmp_path):
    trainer = backend(path)
    trainer.forward_backward(samples(1))
    trainer.step()
    trainer.save(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in trainer.weights().items())
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == '{"kept": "byte for byte"}'


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"train": TrainSection(device="cuda:77")},
            "train.device: 'cuda:77' is not allowed; this machine has cpu",
        ),
        (
            {"model": ModelSection(dtype="float16")},
            "model.dtype: 'float16' is not allowed; float32 or bfloat16: gradients underflow",
        ),
        ({"algorithm": AlgorithmSection(dual_clip=0.9)}, "algorithm.dual_clip: 0.9"),
        (
            {"algorithm": AlgorithmSection(loss_agg_mode="seq-mean-token-sum-norm")},
            "algorithm.loss_agg_mode",
        ),
        ({"algorithm": AlgorithmSection(pg_variant="poo")}, "losses: 'poo' is not allowed; .*ppo"),
        ({"algorithm": AlgorithmSection(kl_coef=0.1), "ref_path": "/nowhere"}, "/nowhere"),
    ],
)
def test_impossible_settings(path, change, problem):
    with pytest.raises(ConfigError, match=problem):
        backend(path, **change)


def test_a_path_without_a_model(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path"):
        backend(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ConfigError, match=r"model\.path.*cannot load"):
        backend(str(tmp_path))
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}'
    )
    with pytest.raises(
        ConfigError,
        match=r"model\.path.*cannot load.*must be equal to the number of `?layer[_ ]types",
    ):
        backend(str(tmp_path))


def test_missing_weights_are_not_drawn_at_random(path, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(path, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"1 of its weights are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        backend(str(folder))


def test_token_ids_beyond_the_vocabulary_are_refused_before_anything_is_added(path):
    trainer, rows = backend(path), samples(1)
    rows[-1].token_ids[0] = VOCAB
    with pytest.raises(
        WireError, match=f"group 1: token id {VOCAB} is outside the model's vocabulary of {VOCAB}"
    ):
        trainer.forward_backward(rows)
    assert not gradient(trainer).any()
    assert state_of(trainer)  # no step is under way
