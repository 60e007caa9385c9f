"""Supervised fine-tuning in one function, for the warm start of a run.

The loss covers the assistant's turns, with their end. It is exactly the mean over all trained tokens of a step's batch,
however the batch is cut into micro-batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from broker.errors import UserError
from learner.backends.models.policy import load_model, pick_device
from learner.offline.data import TokenizedExample, load_examples, micro_batches, shuffled_batches
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.hub import copy_tokenizer
from rlearner_text.tokenizer import Tokenizer

OnStep = Callable[[int, dict[str, float]], None]

_IGNORED: Final = -100
_CPU_MICRO_BATCH_TOKENS: Final = 2048  # larger ones exceed the cache: 8192 takes 1.35 times as long (0.65 M parameters)


def run_sft(
    model_path: str,
    data_path: str,
    out_path: str,
    *,
    steps: int,
    batch_size: int = 32,
    lr: float = 1e-3,
    seed: int = 0,
    num_threads: int = 0,
    on_step: OnStep | None = None,
    warmup_steps: int | None = None,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    micro_batch_tokens: int = 8192,
    dtype: str = "float32",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Train a model on a JSONL of conversations and write a Hugging Face folder, whole or not at all.

    Args:
        model_path: Hugging Face folder or hub name.
        data_path: rows ``{"messages": [{"role": …, "content": …}, …]}``.
        out_path: folder to write; replaced if it exists.
        steps: optimizer steps.
        batch_size: conversations of one step.
        lr: peak learning rate, reached after ``warmup_steps`` (None: a twentieth of the steps) and decayed linearly to
        0.
        seed: of the order of the data, and of dropout.
        num_threads: torch threads, 0 leaves the default; restored afterwards.
        on_step: called with the step, from 1, and loss, lr, grad_norm, tokens_per_s.
        warmup_steps: of the learning rate.
        weight_decay: of AdamW, on matrices only.
        max_grad_norm: gradient clipping, 0 is off.
        micro_batch_tokens: padded tokens of one forward pass, on a CPU at most 2048.
        dtype: of weights and arithmetic.
        device: auto, cpu, cuda, cuda:1.
        trust_remote_code: allow code from the model's folder.

    Returns:
        steps, first_loss, loss (mean of the last tenth of the steps), examples, epochs, tokens (without padding),
        trained_tokens, seconds.

    Raises:
        UserError: if there is no such model or file, a row is malformed, or the loss is not finite.
    """
    check_model_path(model_path)
    tokenizer = Tokenizer.load(model_path, trust_remote_code=trust_remote_code)
    with _torch_settings(num_threads, seed):
        model = load_model(
            model_path, ModelSection(dtype=dtype, trust_remote_code=trust_remote_code), pick_device(device)
        )
        longest = int(getattr(model.config, "max_position_embeddings", 0) or 1 << 20)
        examples = load_examples(data_path, tokenizer, longest)
        most = min(micro_batch_tokens, _CPU_MICRO_BATCH_TOKENS) if model.device.type == "cpu" else micro_batch_tokens
        trainer = _Trainer(model, tokenizer.pad_token_id, lr, weight_decay, max_grad_norm, most)
        started = time.monotonic()
        warmup = max(1, steps // 20) if warmup_steps is None else warmup_steps
        losses: list[float] = []
        tokens = trained = 0
        for step, indices in zip(range(1, steps + 1), shuffled_batches(len(examples), batch_size, seed), strict=False):
            batch = [examples[i] for i in indices]
            began = time.monotonic()
            scale = lr_scale(step, steps, warmup)
            loss, grad_norm = trainer.step(batch, lr * scale)
            if not math.isfinite(loss):
                raise UserError(f"the loss is {loss} at step {step}; lower lr ({lr})")
            losses.append(loss)
            num_tokens = sum(len(e.token_ids) for e in batch)
            tokens += num_tokens
            trained += sum(e.num_trained for e in batch)
            if on_step is not None:
                speed = num_tokens / max(time.monotonic() - began, 1e-9)
                on_step(step, {"loss": loss, "lr": lr * scale, "grad_norm": grad_norm, "tokens_per_s": speed})
        seconds = time.monotonic() - started
        save_model(model, model_path, out_path)
    last = losses[-max(1, steps // 10) :]
    return {
        "steps": steps,
        "first_loss": losses[0] if losses else math.nan,
        "loss": sum(last) / len(last) if last else math.nan,
        "examples": len(examples),
        "epochs": steps * batch_size / len(examples),
        "tokens": tokens,
        "trained_tokens": trained,
        "seconds": seconds,
    }


def lr_scale(step: int, steps: int, warmup_steps: int) -> float:
    """Return the factor of the peak learning rate at a step, from 1: linear up to 1 at ``warmup_steps``, then to 0."""
    peak = max(1, warmup_steps)
    return step / peak if step <= peak else (steps + 1 - step) / (steps + 1 - peak)


def save_model(model: Any, source: str, out: str | Path) -> None:
    """Write weights, config and the source's tokenizer as a Hugging Face folder, whole or not at all."""
    with atomic_folder(out) as folder:
        model.save_pretrained(folder)
        copy_tokenizer(source, folder)


class _Trainer:
    """Forward, backward and AdamW for one model."""

    def __init__(
        self,
        model: Any,
        pad_token_id: int,
        lr: float,
        weight_decay: float,
        max_grad_norm: float,
        micro_batch_tokens: int,
    ) -> None:
        self._model, self._pad = model.train(), pad_token_id
        self._max_grad_norm, self._micro_batch_tokens = max_grad_norm, micro_batch_tokens
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        matrices = [p for p in self._parameters if p.ndim >= 2]
        others = [p for p in self._parameters if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        # One fused kernel over all parameters: otherwise small models spend much of a step between kernels.
        self._optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)

    def step(self, batch: Sequence[TokenizedExample], lr: float) -> tuple[float, float]:
        """Take an optimizer step; return the mean loss per trained token, and the gradient norm before clipping."""
        denominator = sum(example.num_trained for example in batch)
        total = 0.0
        for part in micro_batches(batch, self._micro_batch_tokens):
            loss = self._loss_sum(part) / denominator
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        limit = self._max_grad_norm or math.inf
        grad_norm = torch.nn.utils.clip_grad_norm_(self._parameters, limit).item()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total, grad_norm

    def _loss_sum(self, part: Sequence[TokenizedExample]) -> Tensor:
        ids, labels = (t.to(self._model.device) for t in pad(part, self._pad))
        # Causal attention never reads padding on the right; without a mask the fast causal kernel is used.
        logits = self._model(input_ids=ids, use_cache=False).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
        return functional.cross_entropy(flat, labels[:, 1:].reshape(-1), ignore_index=_IGNORED, reduction="sum")


def pad(part: Sequence[TokenizedExample], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Return token ids and labels, (batch, longest) int64, padded on the right; labels are -100 off the mask."""
    shape = (len(part), max(len(e.token_ids) for e in part))
    ids = torch.full(shape, pad_token_id)
    labels = torch.full(shape, _IGNORED)
    for row, example in enumerate(part):
        tokens, mask = torch.tensor(example.token_ids), torch.tensor(example.loss_mask, dtype=torch.bool)
        ids[row, : len(tokens)] = tokens
        labels[row, : len(tokens)] = torch.where(mask, tokens, _IGNORED)
    return ids, labels


@contextmanager
def _torch_settings(num_threads: int, seed: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if num_threads:
        torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)
