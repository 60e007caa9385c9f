"""Measure the torch backend's training step on packed sequences: tokens/s and MFU.

A step is a gradient over --tokens tokens in sequences of --length, in micro-batches, and the optimizer's update. MFU
counts 6 N + 12 L H Q T operations per token (PaLM, appendix B) against the device's dense bf16 peak, without gradient
checkpointing's second forward pass. mfu is null if the device's peak is not in the table.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from typing import Any

import numpy as np

from bench.gpu import common
from broker.settings.registry import resolve
from learner.algorithm.samples import TrainSample
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument("--backend", default="torch", help="one that trains in this process (%(default)s)")
    made.add_argument("--tokens", type=int, default=None, help="of one step (262144, or 1024)")
    made.add_argument("--length", type=int, default=None, help="of one sequence (2048, or 128)")
    made.add_argument("--micro-batch-tokens", type=int, default=None, help="(16384, or 512)")
    made.add_argument("--gradient-checkpointing", action="store_true")
    made.add_argument("--repeats", type=int, default=7)
    return common.run(_measure, made, arguments)


def sample(length: int, vocab: int, rng: np.random.Generator) -> TrainSample:
    """Return a sequence of which all tokens but the first are trained."""
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    ids = rng.integers(3, vocab, length).astype(np.int32)
    logprobs = np.full(length, -math.log(vocab), np.float32)
    advantages = rng.normal(size=length).astype(np.float32)
    return TrainSample(ids, mask, logprobs, np.where(mask, 0, -1).astype(np.int32), advantages, group=1, reward=0.0)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape, dtype = (common.TINY, "float32") if options.tiny else (common.HALF_BILLION, "bfloat16")
    tokens = options.tokens or (1024 if options.tiny else 262_144)
    length = options.length or (128 if options.tiny else 2048)
    train = TrainSection.model_validate(
        {
            "device": options.device, "backend": options.backend, "lr": 1e-6,
            "gradient_checkpointing": options.gradient_checkpointing,
            "micro_batch_tokens": options.micro_batch_tokens or (512 if options.tiny else 16_384),
        }
    )  # fmt: skip
    rng = np.random.default_rng(0)
    samples = [sample(length, shape.vocab, rng) for _ in range(max(1, tokens // length))]
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, shape, dtype=dtype)
        settings, make = ModelSection.model_validate({"dtype": dtype}), resolve("backends", options.backend, BACKENDS)
        backend = make(model, train=train, algorithm=AlgorithmSection(), model=settings, seed=0)
        found: list[dict[str, float]] = []
        taken = common.seconds(lambda: found.append(_step(backend, samples)), options.device, repeats=options.repeats)
    read = sum(one.num_inputs for one in samples)
    flops = common.train_flops_per_token(shape, length)
    rates = [read / each for each in taken]
    peak = common.peak_flops(device)
    figures: dict[str, Any] = {"tokens_per_s": round(statistics.median(rates), 1)}
    figures |= {"tokens_per_s_low": round(min(rates), 1), "tokens_per_s_high": round(max(rates), 1)}
    figures |= {"step_s": round(statistics.median(taken), 4)}
    figures |= {"mfu": None if peak is None else round(common.mfu(statistics.median(rates), flops, peak) or 0.0, 4)}
    figures |= {"flops_per_token": flops, "peak_flops": peak, "tokens_per_step": read, "sequence_length": length}
    figures |= {"backend": options.backend, "dtype": dtype, "gradient_checkpointing": options.gradient_checkpointing}
    figures |= {"memory_gib": _memory(options.device)}
    finite = all(math.isfinite(value) for step in found for value in step.values())
    checks = {"all_metrics_are_finite": finite, "mfu_below_1": not (figures["mfu"] or 0) > 1}
    return common.finish("learner", device, shape, figures, checks)


def _step(backend: Any, samples: list[TrainSample]) -> dict[str, float]:
    cutter = backend.cutter()
    for one in samples:
        if (full := cutter.add(one)) is not None:
            backend.forward_backward(full)
    if rest := cutter.flush():
        backend.forward_backward(rest)
    metrics: dict[str, float] = backend.step()
    return metrics


def _memory(device: str) -> float | None:
    """Return the peak memory of tensors on the device in GiB."""
    if device != "cuda":
        return None
    import torch

    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


if __name__ == "__main__":
    sys.exit(main())
