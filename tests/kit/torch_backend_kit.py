"""A tiny Qwen3 on disk, samples for it, and the training step written out plainly to compare with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

VOCAB = 23


def save_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    kv_heads: int = 1,
    num_layers: int = 2,
    tied: bool = True,
) -> str:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=2,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=128, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    # sharper than the usual start, so that distributions and gradients differ
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.15)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"kept": "byte for byte"}')
    return str(folder)


def backend(
    path: str,
    *,
    train: TrainSection | None = None,
    algorithm: AlgorithmSection | None = None,
    **rest: object,
) -> TorchBackend:
    model = rest.pop("model", ModelSection())
    train = train or TrainSection(lr=1e-3, device="cpu")
    return TorchBackend(
        path, train=train, algorithm=algorithm or AlgorithmSection(), model=model, seed=0, **rest
    )


def sample(
    rng: np.random.Generator,
    n: int,
    *,
    advantage: float | None = None,
    temperature: float = 1.0,
    group: int = 1,
) -> TrainSample:
    """n tokens, about a third of them trained (at least one), with rollout logprobs near a uniform
    policy's.
    """
    mask = (rng.random(n) < 0.35).astype(np.uint8)
    mask[0], mask[rng.integers(1, n)] = 0, 1
    advantages = rng.normal(size=n) if advantage is None else np.full(n, advantage)
    return TrainSample(
        token_ids=rng.integers(0, VOCAB, n).astype(np.int32),
        loss_mask=mask,
        rollout_logprobs=(mask * rng.normal(-3.1, 0.4, n)).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=(mask * advantages).astype(np.float32),
        group=group,
        reward=0.0,
        temperature=temperature,
    )


def samples(seed: int, count: int = 9, **rest: float) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    return [sample(rng, int(rng.integers(2, 30)), **rest) for _ in range(count)]


def plain_logprobs(model: torch.nn.Module, one: TrainSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies at a sample's trained positions: one unpadded row, all logits."""
    ids = torch.tensor(one.token_ids.astype(np.int64))
    logprobs = (model(input_ids=ids[None]).logits[0, :-1] / one.temperature).log_softmax(-1)
    where = torch.from_numpy(one.positions) - 1
    chosen = logprobs[where, ids[where + 1]]
    return chosen, torch.distributions.Categorical(logits=logprobs[where]).entropy()


def gradient(trainer: TorchBackend) -> torch.Tensor:
    """All gradients in one vector; zeros where there is none."""
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
            for p in trainer.policy.module.parameters()
        ]
    )
