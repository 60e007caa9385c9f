"""Offload and compile change where and how a step is computed, not what comes out; and streamed
gradients are those of a whole step.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_kit import load_state, state_of
from torch_backend_kit import backend, gradient, samples, save_model

from broker.errors import ConfigError
from broker.settings.runspec import validate
from learner import backends
from learner.backends import activation_offload
from learner.backends.models import block_compilation
from learner.config import AlgorithmSection, TrainSection

NAMES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy")


def settings(**more):
    return TrainSection.model_validate(
        {"lr": 1e-2, "device": "cpu", "micro_batch_tokens": 64, **more}
    )


def five(path, algorithm=None, **more):
    trainer = backend(path, train=settings(**more), algorithm=algorithm)
    return trainer, [trainer.update(samples(seed)) for seed in range(5)]


def agree(found, expected):
    for one, wanted in zip(found, expected, strict=True):
        assert [one[name] for name in NAMES] == pytest.approx(
            [wanted[name] for name in NAMES], abs=1e-5
        )


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_an_offloaded_optimizer_makes_the_same_steps(tmp_path, kind):
    from rlearner_text.config import ModelSection

    path = save_model(tmp_path, dtype=getattr(torch, kind))
    made = []
    for wanted in (False, True):
        trainer = backend(
            path, train=settings(optimizer_offload=wanted), model=ModelSection(dtype=kind)
        )
        made.append((trainer, [trainer.update(samples(seed)) for seed in range(3)]))
    (plain, expected), (offloaded, found) = made
    assert found == expected
    assert all(
        torch.equal(offloaded.weights()[name], tensor) for name, tensor in plain.weights().items()
    )
    optimizer = offloaded.worker.optimizer
    live = {tensor.data_ptr() for tensor in offloaded.policy.tensors().values()}
    assert not any(master.data_ptr() in live for master in optimizer._masters.values())
    assert {master.dtype for master in optimizer._masters.values()} == {torch.float32}
    load_state(plain, state_of(offloaded))  # a checkpoint of one resumes as the other
    load_state(offloaded, state_of(plain))
    assert offloaded.update(samples(9)) == plain.update(samples(9))


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}, {"lora": {"rank": 4}}])
def test_offloaded_activations_make_the_same_steps_and_weights_stay(tmp_path, monkeypatch, more):
    if "lora" in more:
        pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")
    path = save_model(tmp_path)
    _, expected = five(path, **more)
    leaves, seen = activation_offload._is_offloaded, {"moved": 0, "bytes": 0}

    def as_on_a_gpu(tensor):
        class Seen:
            is_cuda, nbytes, _base = True, 1 << 20, tensor._base

        weight = isinstance(tensor, torch.nn.Parameter)
        moves = not weight and leaves(Seen())  # type: ignore[arg-type]
        if moves:
            assert tensor.untyped_storage().data_ptr() not in weights
            seen["moved"], seen["bytes"] = seen["moved"] + 1, seen["bytes"] + tensor.nbytes
        return moves

    trainer = backend(path, train=settings(activation_offload=True, **more))
    weights = {p.untyped_storage().data_ptr() for p in trainer.policy.module.parameters()}
    monkeypatch.setattr(activation_offload, "_is_offloaded", as_on_a_gpu)
    agree([trainer.update(samples(seed)) for seed in range(5)], expected)
    assert seen["moved"] > 20
    assert seen["bytes"] > 1e5


@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    os.environ.get("RL_OPTIONS") != "1",
    reason="compiling takes a minute on a CPU: make test-options",
)
@pytest.mark.filterwarnings("default")  # torch warns in its own compiler
@pytest.mark.parametrize(
    "more",
    [
        {"packing": "packed"},
        {"packing": "padded"},
        {"lora": {"rank": 4}, "gradient_checkpointing": True},
    ],
)
def test_compiled_blocks_make_the_same_steps(tmp_path, more):
    path = save_model(tmp_path)
    algorithm = AlgorithmSection(kl_coef=0.2)
    torch._dynamo.utils.counters.clear()
    _, expected = five(path, algorithm, **more)
    assert not torch._dynamo.utils.counters["stats"]
    _, found = five(path, algorithm, compile=True, **more)
    agree(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    # nothing is compiled anew for each batch
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] < 40
    torch._dynamo.reset()


def test_compile_without_a_compiler_or_blocks_is_refused(tmp_path, monkeypatch):
    path = save_model(tmp_path)
    module = backend(path).policy.module
    module._no_split_modules = []
    with pytest.raises(
        ConfigError,
        match=r"train.compile: True is not allowed; false: Qwen3ForCausalLM names no blocks",
    ):
        block_compilation.compile_blocks(module, torch.device("cpu"))
    monkeypatch.setattr(block_compilation.shutil, "which", lambda _: None)
    with pytest.raises(
        ConfigError,
        match=r"train.compile: True is not allowed; false: on a CPU it needs a C\+\+ compiler",
    ):
        backend(path, train=settings(compile=True))


@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"kl_coef": 0.2, "entropy_coef": 0.01},
        {"pg_variant": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    ],
)
def test_a_streamed_step_is_a_whole_step_of_one_epoch_and_one_minibatch(tmp_path, algorithm):
    # The same gradient before it is normalised, and after the update the same weights, however the
    # stream was cut.
    path, rows = save_model(tmp_path), samples(3, 20)
    section = AlgorithmSection(**algorithm)
    streamed, whole = (
        backend(path, train=settings(max_grad_norm=0.0), algorithm=section) for _ in range(2)
    )
    cutter = streamed.cutter()
    parts = [full for row in rows if (full := cutter.add(row)) is not None]
    for part in [*parts, cutter.flush()]:
        streamed.forward_backward(part)
    found = gradient(streamed)
    take = type(whole)._take
    kept = []
    type(whole)._take = lambda self: (kept.append(gradient(self)), take(self))[1]
    try:
        done = whole.update(rows)
    finally:
        type(whole)._take = take
    assert len(parts) > 2
    assert found.norm() > 1
    assert torch.equal(found, kept[0]) or float((found - kept[0]).norm() / found.norm()) < 1e-6
    metrics = streamed.step()
    assert [metrics[name] for name in NAMES] == pytest.approx(
        [done[name] for name in NAMES], rel=1e-6
    )
    for name, tensor in streamed.weights().items():
        torch.testing.assert_close(whole.weights()[name], tensor, rtol=0, atol=1e-6)


def resolved(algorithm=None, **train):
    domain = {
        "env": "frozenlake",
        "group_size": 4,
        "max_context_tokens": 256,
        "sampling": {"max_tokens": 4},
        "deadline_s": 60,
    }
    return validate({"domains": {"lake": domain}, "train": train, "algorithm": algorithm or {}})


@pytest.mark.parametrize(
    ("train", "key", "allowed"),
    [
        ({"lora": {"rank": 0}}, "train.lora.rank", "greater than 0"),
        ({"lora": {"dropout": 1.0}}, "train.lora.dropout", "less than 1"),
        (
            {"lora": {"targets": ["q_proj"]}},
            "train.lora.targets",
            "did you mean 'train.lora.target_modules'?",
        ),
        (
            {"compile": True, "backend": "elsewhere"},
            "train.compile",
            f"unset with train.backend elsewhere; {', '.join(backends.SUPPORTED_OPTIONS['compile'])} take it",
        ),
        (
            {"lora": {}, "backend": "elsewhere"},
            "train.lora",
            "unset with train.backend elsewhere; torch, ddp, fsdp2, deepspeed, megatron take it",
        ),
        (
            {
                "algorithm": {"adv_estimator": "gae", "critic": {"enabled": True}},
                "backend": "elsewhere",
            },
            "train.backend",
            f"{', '.join(backends.SUPPORTED_OPTIONS['critic'])} with algorithm.critic.enabled",
        ),
    ],
)
def test_refused(monkeypatch, train, key, allowed):
    monkeypatch.setitem(backends.BACKENDS, "elsewhere", "learner.backends.torch:TorchBackend")
    with pytest.raises(ConfigError) as caught:
        resolved(**train)
    assert caught.value.key == key
    assert allowed in str(caught.value)


def test_off_by_default_and_a_word_turns_adapters_on():
    assert resolved()["train"]["lora"] is None
    found = resolved(lora={"rank": 8})["train"]
    assert found["lora"] == {
        "rank": 8,
        "alpha": 32,
        "dropout": 0.0,
        "target_modules": "all-linear",
        "send": "adapter",
    }
    assert (found["compile"], found["activation_offload"], found["optimizer_offload"]) == (
        False,
        False,
        False,
    )


def test_a_critic_goes_on_from_its_checkpoint_with_an_offloaded_optimizer(tmp_path):
    path = save_model(tmp_path / "model")
    algorithm = AlgorithmSection.model_validate(
        {"adv_estimator": "gae", "critic": {"enabled": True, "lr": 1e-2}}
    )
    rows = [
        replace(one, values=one.advantages * 0, returns=np.sin(one.token_ids).astype(np.float32))
        for one in samples(3)
    ]
    first, plain = (
        backend(path, train=settings(optimizer_offload=wanted), algorithm=algorithm)
        for wanted in (True, False)
    )
    assert first.update(rows) == plain.update(rows)
    state, weights = state_of(first), tmp_path / "saved"
    first.save(weights)
    second = backend(
        str(weights), train=settings(optimizer_offload=True), algorithm=algorithm, ref_path=path
    )
    load_state(second, state)
    assert second.update(rows) == first.update(rows) == plain.update(rows)
    assert all(
        torch.equal(state_of(second)[name], tensor) for name, tensor in state_of(first).items()
    )
