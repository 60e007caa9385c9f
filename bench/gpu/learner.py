"""Measure the torch backend's training step on sequences of several lengths: tokens/s, MFU and peak
memory.

A step is a gradient over --tokens tokens in sequences of each of --lengths, in micro-batches, and
the optimizer's update. ``mfu`` counts 6 N + 12 L H Q T operations per token (PaLM, appendix B)
against the device's dense bf16 peak, ``mfu_causal`` 6 N + 6 L H Q T, as a causal kernel computes
only half of the attention; neither counts gradient checkpointing's second forward pass. Both are
null if the device's peak is not in the table. ``plan_gib`` is the peak memory that ``rlearner
plan`` expects. Figures of the first length have plain names, those of others end in its number.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.gpu import common
from broker.settings.registry import resolve
from learner.algorithm.samples import TrainSample
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from rlearner.plan.facts import TrainFacts
from rlearner.plan.model_reader import read_folder
from rlearner.plan.training_memory import LearnerLayout, learner_memory
from rlearner_text.config import ModelSection


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument(
        "--backend", default="torch", help="one that trains in this process (%(default)s)"
    )
    made.add_argument("--tokens", type=int, default=None, help="of one step (131072, or 1024)")
    made.add_argument(
        "--lengths", type=_lengths, default=None, help="of a sequence (16384,4096, or 128,64)"
    )
    made.add_argument("--micro-batch-tokens", type=int, default=None, help="(16384, or 512)")
    made.add_argument(
        "--no-gradient-checkpointing", dest="gradient_checkpointing", action="store_false"
    )
    made.add_argument("--repeats", type=int, default=5)
    return common.run(_measure, made, arguments)


def sample(length: int, vocab: int, rng: np.random.Generator) -> TrainSample:
    """Return a sequence of which all tokens but the first are trained."""
    mask = np.ones(length, np.uint8)
    mask[0] = 0
    ids = rng.integers(3, vocab, length).astype(np.int32)
    logprobs = np.full(length, -math.log(vocab), np.float32)
    advantages = rng.normal(size=length).astype(np.float32)
    return TrainSample(
        ids, mask, logprobs, np.where(mask, 0, -1).astype(np.int32), advantages, group=1, reward=0.0
    )


def _lengths(text: str) -> list[int]:
    """Parse numbers of tokens with commas between them."""
    lengths = [int(part) for part in text.split(",")]
    if min(lengths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths are numbers from 2 on")
    return lengths


def _measure(options: argparse.Namespace, device: str) -> int:
    shape, dtype = (common.TINY, "float32") if options.tiny else (common.HALF_BILLION, "bfloat16")
    lengths = options.lengths or ([128, 64] if options.tiny else [16_384, 4096])
    figures: dict[str, Any] = {"backend": options.backend, "dtype": dtype, "lengths": lengths}
    figures |= {
        "gradient_checkpointing": options.gradient_checkpointing,
        "peak_flops": common.peak_flops(device),
    }
    settings = ModelSection.model_validate({"dtype": dtype})
    train = TrainSection.model_validate(
        {
            "device": options.device, "backend": options.backend, "lr": 1e-6,
            "gradient_checkpointing": options.gradient_checkpointing,
            "micro_batch_tokens": options.micro_batch_tokens or (512 if options.tiny else 16_384),
        }
    )  # fmt: skip
    checks: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, shape, dtype=dtype)
        make = resolve("backends", options.backend, BACKENDS)
        backend = make(model, train=train, algorithm=AlgorithmSection(), model=settings, seed=0)
        figures["unpackable"] = backend.worker.models.policy.unpackable
        for number, length in enumerate(lengths):
            ending = f"_{length}" if number else ""
            measured = _measure_length(options, backend, shape, length, figures["peak_flops"])
            if options.device == "cuda":
                measured["plan_gib"] = _plan_gib(model, train, settings)
            metrics_finite = measured.pop("finite")
            checks[f"metrics_are_finite{ending}"] = metrics_finite
            checks[f"mfu_below_1{ending}"] = not (measured["mfu"] or 0) > 1
            figures |= {name + ending: value for name, value in measured.items()}
            common.show(figures)
    return common.finish("learner", device, shape, figures, checks)


def _measure_length(
    options: argparse.Namespace,
    backend: Any,
    shape: common.ModelShape,
    length: int,
    peak: float | None,
) -> dict[str, Any]:
    """Return the figures of steps on sequences of one length."""
    tokens = options.tokens or (1024 if options.tiny else 131_072)
    rng = np.random.default_rng(0)
    samples = [sample(length, shape.vocab, rng) for _ in range(max(1, tokens // length))]
    metrics: list[dict[str, float]] = []
    _reset_peak(options.device)
    taken = common.seconds(
        lambda: metrics.append(_step(backend, samples)),
        options.device,
        repeats=options.repeats,
        warm_up=1,
    )
    read = sum(each.num_inputs for each in samples)
    rates = [read / each for each in taken]
    rate = statistics.median(rates)
    figures: dict[str, Any] = {
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_low": round(min(rates), 1),
    }
    figures |= {
        "tokens_per_s_high": round(max(rates), 1),
        "step_s": round(statistics.median(taken), 4),
    }
    for name, causal in (("mfu", False), ("mfu_causal", True)):
        flops = common.train_flops_per_token(shape, length, causal=causal)
        share = common.mfu(rate, flops, peak)
        figures |= {name: None if share is None else round(share, 4)}
    figures |= {"tokens_per_step": read, "memory_gib": _memory(options.device)}
    figures["finite"] = all(math.isfinite(value) for step in metrics for value in step.values())
    return figures


def _plan_gib(model: str, train: TrainSection, settings: ModelSection) -> float:
    """Return the peak memory that ``rlearner plan`` expects of such a step, in GiB."""
    facts = TrainFacts(train.micro_batch_tokens)
    layout = LearnerLayout("torch", checkpointing=train.gradient_checkpointing)
    memory = learner_memory(read_folder(Path(model), model, settings, None), facts, layout)
    return round(memory.total() / 2**30, 2)


def _reset_peak(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()


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
