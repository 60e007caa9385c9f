"""Compare packed with padded rows: tokens per second of the torch backend, interleaved; median and
range of the ratio.

    python -m bench.packing [--pairs 7]

``groups`` has 8 groups of 8 samples with prompts of 100 to 300 tokens, which a packed row holds
once for each group; the samples of the other two share nothing. Tokens are counted as often as
samples have them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from rlearner_text.config import ModelSection

_VOCABULARY: Final = 64


def lengths(kind: str, rng: np.random.Generator) -> list[int]:
    """Return sequence lengths of a step: like those of the quickstart, or with a long tail."""
    if kind == "quickstart":
        return [int(n) for n in rng.integers(60, 200, 64)]
    return [int(n) for n in np.minimum(rng.lognormal(4.5, 1.0, 64) + 8, 2000)]


def make_samples(kind: str, rng: np.random.Generator) -> list[TrainSample]:
    """Return the 64 samples of a step."""
    if kind != "groups":
        return [sample(n, rng) for n in lengths(kind, rng)]
    found: list[TrainSample] = []
    for _ in range(8):
        prompt = rng.integers(0, _VOCABULARY, int(rng.integers(100, 300)))
        found += [sample(len(prompt) + int(rng.integers(60, 200)), rng, prompt) for _ in range(8)]
    return found


def sample(
    n: int, rng: np.random.Generator, prompt: Sequence[int] | npt.NDArray[Any] = ()
) -> TrainSample:
    """Return n tokens, first those of a prompt; of the others half are trained, and the last."""
    mask = np.zeros(n, np.uint8)
    mask[1::2] = 1
    mask[: len(prompt)] = 0
    mask[-1] = 1
    zeros = np.zeros(n, np.float32)
    ids = rng.integers(0, _VOCABULARY, n).astype(np.int32)
    ids[: len(prompt)] = prompt
    return TrainSample(
        ids,
        mask,
        zeros - 4,
        np.where(mask, 0, -1).astype(np.int32),
        mask.astype(np.float32),
        group=1,
        reward=0.0,
    )


def save_model(folder: str) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    Qwen3ForCausalLM(
        Qwen3Config(vocab_size=_VOCABULARY, head_dim=64, max_position_embeddings=4096, **shape)
    ).save_pretrained(folder)


def step(backend: TorchBackend, samples: list[TrainSample]) -> float:
    began = time.perf_counter()
    cutter = backend.cutter()
    for one in samples:
        if (full := cutter.add(one)) is not None:
            backend.forward_backward(full)
    if rest := cutter.flush():
        backend.forward_backward(rest)
    seconds = time.perf_counter() - began
    backend.discard()
    return seconds


def measure(path: str, kind: str, pairs: int, most: int | None = None) -> dict[str, float]:
    rng = np.random.default_rng(0)
    samples = make_samples(kind, rng)[:most]
    tokens = sum(one.num_inputs for one in samples)
    backends = {}
    for packing in ("packed", "padded"):
        train = TrainSection.model_validate({"device": "cpu", "packing": packing, "num_threads": 1})
        backends[packing] = TorchBackend(
            path, train=train, algorithm=AlgorithmSection(), model=ModelSection(), seed=0
        )
        step(backends[packing], samples)
    rates: dict[str, list[float]] = {"packed": [], "padded": []}
    for pair in range(pairs):
        for packing in ("packed", "padded") if pair % 2 else ("padded", "packed"):
            rates[packing].append(tokens / step(backends[packing], samples))
    ratios = sorted(
        packed / padded for packed, padded in zip(rates["packed"], rates["padded"], strict=True)
    )
    figures: dict[str, float] = {"packed_tokens_per_s": round(statistics.median(rates["packed"]))}
    figures |= {"padded_tokens_per_s": round(statistics.median(rates["padded"]))}
    figures |= {"ratio": round(statistics.median(ratios), 3), "ratio_low": round(ratios[0], 3)}
    return figures | {"ratio_high": round(ratios[-1], 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--samples", type=int, help="at most so many (all)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        kinds = ("quickstart", "long_tail", "groups")
        print(
            json.dumps(
                {kind: measure(folder, kind, options.pairs, options.samples) for kind in kinds}
            )
        )


if __name__ == "__main__":
    main()
