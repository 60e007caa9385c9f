"""LoRA: against peft by hand and a plain loop, what is trained, what is merged, what a checkpoint
holds.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_kit import state_of
from torch_backend_kit import VOCAB, backend, plain_logprobs, samples, save_model
from transformers import AutoModelForCausalLM

from broker.errors import ConfigError, UserError
from broker.weights.rounding import cast
from learner.algorithm.losses import ppo
from learner.checkpoints import checkpoint
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

peft = pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

RANK, ALPHA, LR = 4, 12, 1e-2


def settings(**more):
    given = {
        "lr": LR,
        "device": "cpu",
        "micro_batch_tokens": 64,
        "lora": {"rank": RANK, "alpha": ALPHA},
    }
    return TrainSection.model_validate(given | more)


def start(path, *, algorithm=None, ref_path=None, dtype="float32", **more):
    return backend(
        path,
        train=settings(**more),
        algorithm=algorithm,
        ref_path=ref_path,
        model=ModelSection(dtype=dtype),
    )


def move(trainer, steps):
    return [trainer.update(samples(seed)) for seed in steps]


def factors(trainer):
    return {name: p for name, p in trainer.policy.module.named_parameters() if ".lora_" in name}


def by_hand(path, first, steps):
    """The losses of REINFORCE-like PPO on the same samples: peft's own model, one row at a time,
    plain AdamW.
    """
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), config
    ).eval()
    theirs = {
        name.removeprefix("base_model.model."): p
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert theirs.keys() == first.keys()
    with torch.no_grad():
        for name, factor in theirs.items():
            factor.copy_(first[name])
    optimizer = torch.optim.AdamW(theirs.values(), lr=LR, weight_decay=0.0)
    losses, norms = [], []
    for step in steps:
        rows = [one for one in samples(step) if one.num_tokens]
        total = torch.zeros(())
        for one in rows:
            new, _ = plain_logprobs(model, one)
            ratio = (new - torch.from_numpy(one.rollout_logprobs[one.positions])).exp()
            advantage = torch.from_numpy(one.advantages[one.positions])
            total = (
                total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).sum()
            )
        loss = total / sum(one.num_tokens for one in rows)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, model


def test_five_steps_as_peft_by_hand_and_merged_as_peft_merges(tmp_path):
    assert ppo  # the loss that by_hand writes out
    path = save_model(tmp_path)
    trainer = start(path)
    first = {name: p.detach().clone() for name, p in factors(trainer).items()}
    found = move(trainer, range(5))
    losses, norms, model = by_hand(path, first, range(5))
    assert [one["actor/pg_loss"] for one in found] == pytest.approx(losses, abs=1e-5)
    assert [one["actor/grad_norm"] for one in found] == pytest.approx(norms, rel=1e-4)
    assert max(norms) > 0.1
    merged = dict(model.merge_and_unload().named_parameters())
    weights = trainer.weights()
    assert weights.keys() == merged.keys()  # tied ones once
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, merged[name].detach(), rtol=0, atol=1e-5)


def test_only_adapters_are_trained_and_in_the_optimizer(tmp_path):
    path = save_model(tmp_path)
    trainer = start(path)
    before = {name: tensor.clone() for name, tensor in trainer.policy.tensors().items()}
    trainer.forward_backward(samples(1))
    own = factors(trainer)
    assert len(own) == 2 * 7 * 2  # A and B of seven linear layers in two blocks
    with_gradient = {
        name for name, p in trainer.policy.module.named_parameters() if p.grad is not None
    }
    assert with_gradient == own.keys()
    trainer.step()
    changed = {
        name
        for name, tensor in trainer.policy.tensors().items()
        if not torch.equal(tensor, before[name])
    }
    assert changed
    assert changed <= own.keys()
    assert {p.dtype for p in own.values()} == {torch.float32}
    state = state_of(trainer)
    assert sorted(name for name in state if "exp_avg." in name) == sorted(
        f"optimizer.exp_avg.{name}" for name in own
    )


def test_shapes_and_first_weights_are_those_of_the_plain_model(tmp_path):
    path = save_model(tmp_path)
    trainer, plain = start(path), backend(path)
    assert list(trainer.weights()) == list(plain.weights()) == list(trainer.shapes())
    for name, tensor in plain.weights().items():
        assert torch.equal(trainer.weights()[name], tensor)  # B is 0
        assert trainer.shapes()[name].shape == tensor.shape
    ids = np.arange(20) % VOCAB
    assert torch.equal(trainer.logprobs(ids), plain.logprobs(ids))


def test_checkpoint_for_transformers_and_for_peft(tmp_path):
    path = save_model(tmp_path / "first")
    trainer = start(path)
    move(trainer, range(3))
    folder = checkpoint.write_checkpoint(tmp_path / "checkpoints", trainer, {"version": 3}, 1)
    ids = np.arange(30) % VOCAB
    want = trainer.logprobs(ids)
    assert (want - backend(path).logprobs(ids)).abs().max() > 0.05
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(merged).__name__ == "Qwen3ForCausalLM"
    assert not any("lora" in name for name in merged.state_dict())
    for name, tensor in trainer.weights().items():
        assert torch.equal(merged.state_dict()[name], tensor)
    adapted = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), folder / "adapter"
    ).eval()
    said = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["base_model_name_or_path"]) == (RANK, ALPHA, path)
    tokens = torch.tensor(ids)
    for model in (merged, adapted):
        logprobs = (
            model(input_ids=tokens[None, :-1])
            .logits[0]
            .log_softmax(-1)
            .gather(-1, tokens[1:, None])[:, 0]
        )
        torch.testing.assert_close(logprobs, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "more"),
    [
        ("float32", {}),
        ("float32", {"lora": {"rank": RANK, "dropout": 0.3}}),
        ("bfloat16", {"optimizer_offload": True}),
    ],
)
def test_resume_is_bit_identical(tmp_path, dtype, more):
    path = save_model(tmp_path / "first", dtype=getattr(torch, dtype))
    whole = start(path, dtype=dtype, **more)
    move(whole, range(2))
    written = checkpoint.write_checkpoint(tmp_path / "checkpoints", whole, {"version": 2}, 1)
    expected = move(whole, range(2, 4))
    again = start(str(written), ref_path=path, dtype=dtype, **more)
    checkpoint.load_state(checkpoint.read_checkpoint(written), again)
    # a step that is given up leaves nothing behind, no draw of the dropout either
    again.forward_backward(samples(99))
    again.discard()
    assert move(again, range(2, 4)) == expected
    assert all(
        torch.equal(again.weights()[name], tensor) for name, tensor in whole.weights().items()
    )


def test_dropout_is_drawn_anew_for_each_slice_and_only_in_training(tmp_path):
    path = save_model(tmp_path)
    lora = {"rank": RANK, "alpha": ALPHA, "dropout": 0.5}
    losses = []
    for _ in range(2):
        trainer = start(path, lora=lora)
        move(trainer, range(2))
        rows = samples(5)
        scored = [trainer.score(rows)[0].logprobs for _ in range(2)]
        assert np.array_equal(*scored)
        losses.append([trainer.forward_backward(rows)["pg_loss"] for _ in range(2)])
        assert not any(m.training for m in trainer.policy.module.modules())
    assert losses[0][0] != losses[0][1]
    assert losses[0] == losses[1]
    seeds = set()
    # their slices are others, and so must be what they leave out
    for trainer.worker.passes.rank in range(4):
        trainer.discard()
        seeds.add(trainer.worker.passes.draw_seed())
    assert len(seeds) == 4


def test_the_reference_is_the_base_without_a_second_copy(tmp_path):
    path = save_model(tmp_path)
    algorithm = AlgorithmSection(kl_coef=0.3)
    trainer, full = start(path, algorithm=algorithm), backend(path, algorithm=algorithm)
    move(trainer, range(2))
    # a policy at the merged weights, a reference of its own
    alone = backend(path, algorithm=algorithm, train=settings(lora=None))
    with torch.no_grad():
        for name, tensor in trainer.weights().items():
            dict(alone.policy.module.named_parameters())[name].copy_(tensor)
    found, expected = (one.update(samples(7))["actor/kl_loss"] for one in (trainer, alone))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found > 1e-4
    assert not isinstance(trainer.worker.models.ref, type(full.worker.models.ref))
    held = sum(p.numel() for p in trainer.policy.module.parameters())
    assert held < 1.5 * sum(p.numel() for p in full.policy.module.parameters())


def test_bfloat16_merges_in_float32_and_casts_once(tmp_path):
    path = save_model(tmp_path, dtype=torch.bfloat16)
    trainer = start(path, dtype="bfloat16")
    move(trainer, range(3))
    tensors = trainer.policy.tensors()
    stem = "model.layers.1.mlp.down_proj"
    a, b = (tensors[f"{stem}.lora_{part}.default.weight"] for part in "AB")
    want = tensors[f"{stem}.base_layer.weight"].float() + b @ a * (ALPHA / RANK)
    merged = trainer.weights()[f"{stem}.weight"]
    assert torch.equal(merged, cast(want, torch.bfloat16))
    # As a sum it is nearer to the exact weights than what is rounded to nearest.
    inputs = torch.ones(want.shape[1])
    assert (merged.float() @ inputs - want @ inputs).norm() < 0.05 * (want @ inputs).norm()
    assert trainer.shapes()[f"{stem}.weight"].dtype == torch.bfloat16


def test_gradient_checkpointing_and_packing_change_nothing(tmp_path):
    path = save_model(tmp_path)
    expected = [one["actor/pg_loss"] for one in move(start(path), range(3))]
    for more in ({"gradient_checkpointing": True}, {"packing": "padded"}):
        assert [
            one["actor/pg_loss"] for one in move(start(path, **more), range(3))
        ] == pytest.approx(expected, abs=1e-5)


def test_refused(tmp_path, monkeypatch):
    path = save_model(tmp_path / "first")
    with pytest.raises(
        ConfigError,
        match=r"train.lora.target_modules: \['lm_head', 'q'\] is not allowed; linear layers .* q_proj, up_proj",
    ):
        start(path, lora={"target_modules": ["q", "q_proj", "lm_head"]})
    full = backend(path)
    full_folder = checkpoint.write_checkpoint(tmp_path / "full", full, {"version": 1}, 1)
    with pytest.raises(
        ConfigError,
        match=r"train.lora: .* is not allowed; null: .*step-000001 was trained without adapters",
    ):
        start(str(full_folder), ref_path=path)
    trainer = start(path)
    folder = checkpoint.write_checkpoint(tmp_path / "lora", trainer, {"version": 1}, 1)
    with pytest.raises(
        ConfigError,
        match=r"train.lora.rank: 5 is not allowed; 4, as in .*: adapters cannot change their shape",
    ):
        start(str(folder), ref_path=path, lora={"rank": 5, "alpha": ALPHA})
    with pytest.raises(UserError, match="belongs to another model"):
        checkpoint.load_state(
            checkpoint.read_checkpoint(folder), backend(str(folder), ref_path=path)
        )
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(
        ConfigError,
        match=r"train.lora: .* null, for the package peft is not installed: pip install 'rlearner\[lora\]'",
    ):
        start(path)


def test_a_new_run_from_a_checkpoint_with_adapters_begins_with_its_merged_weights(tmp_path):
    path = save_model(tmp_path / "first")
    trainer = start(path)
    move(trainer, range(2))
    folder = Path(checkpoint.write_checkpoint(tmp_path / "checkpoints", trainer, {"version": 2}, 1))
    fresh = start(str(folder))
    assert all(
        torch.equal(fresh.weights()[name], tensor) for name, tensor in trainer.weights().items()
    )
    assert not any(p.any() for name, p in factors(fresh).items() if ".lora_B." in name)
