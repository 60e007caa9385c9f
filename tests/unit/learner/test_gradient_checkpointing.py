"""Activations computed again give the same bits."""

from collections import Counter

import pytest
import torch
import transformers
from torch_backend_kit import VOCAB, backend, gradient, samples, save_model

from broker.errors import ConfigError
from learner.config import TrainSection


def settings(packing, checkpointing=False):
    return TrainSection(
        lr=1e-3, device="cpu", packing=packing, gradient_checkpointing=checkpointing
    )


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_gradient_is_identical_and_blocks_run_twice(tmp_path, packing):
    path, found, calls = save_model(tmp_path), [], Counter()
    for checkpointing in (False, True):
        trainer = backend(path, train=settings(packing, checkpointing))
        block = trainer.policy.module.model.layers[0].mlp
        block.register_forward_pre_hook(lambda *_, on=checkpointing: calls.update([on]))
        trainer.forward_backward(samples(1))
        found.append(gradient(trainer))
        assert not block.training
    assert found[0].norm() > 0
    assert torch.equal(*found)
    assert calls == {False: 1, True: 2}


def test_a_model_without_blocks_is_refused(tmp_path):
    config = transformers.MambaConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4, eos_token_id=0
    )
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    trainer = backend(str(tmp_path), train=settings("padded"))
    trainer.policy.module.supports_gradient_checkpointing = False
    with pytest.raises(
        ConfigError,
        match=r"train.gradient_checkpointing: True is not allowed; false: MambaForCausalLM has no blocks",
    ):
        trainer.policy.checkpoint_blocks()
