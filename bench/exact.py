"""Compare the logprobs of engine ``hf`` and learner bit by bit, and measure what that costs.

    python -m bench.exact [--pairs 5] [--requests 32] [--hidden 256] [--layers 4] [--dtype float32]

An engine and a learner with ``rollout.exact``, and an ordinary pair, take turns on the same small
Qwen3. In each turn an engine plays conversations of two turns, all at once: prompts of 29 to 149
tokens in groups of four that are equal, all with the same beginning, answers of 8 to 32. The
learner scores the sampled tokens, packed with each other, and trains a step on them; the engine
gets the new weights. The last line is one JSON object: ``equal``, whether all ``tokens`` of the
exact pair have the bits that the engine returned; ``is_mean`` and ``kl``, metrics of its steps;
``ordinary_equal``, the share of equal tokens without it, and ``ordinary_largest``, their largest
difference; ``cost``, the exact pair's tokens per second and seconds of a step by the ordinary
pair's, medians of interleaved pairs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from bench.engine import make_model
from broker.contract import wire
from learner.algorithm.samples import TrainSample
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from learner.weights.probing import WeightProbe
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine import HFEngine

MAX_CONTEXT = 512
GROUP_SIZE = 4
BEGINNING = 24  # tokens that all prompts share
QUESTION = 12  # tokens between the two answers of a conversation

Floats = npt.NDArray[np.float32]


@dataclass
class EngineLearnerPair:
    """An engine and a learner of the same weights, and what was measured of them."""

    engine: HFEngine
    learner: TorchBackend
    is_exact: bool
    tokens_per_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    differences: list[Floats] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    async def take_turn(self, prompts: list[list[int]], *, is_measured: bool) -> None:
        """Play, compare, train, and send the weights."""
        version = self.learner.version
        began = time.perf_counter()
        plays = (
            play(self.engine, prompt, f"{version}-{number}")
            for number, prompt in enumerate(prompts)
        )
        samples = await asyncio.gather(*plays)
        seconds = time.perf_counter() - began
        scores = self.learner.score(samples)
        for sample, score in zip(samples, scores, strict=True):
            assert score.logprobs is not None
            self.differences.append(score.logprobs - sample.rollout_logprobs[sample.positions])
        step_s = self._train(samples)
        if is_measured:
            self.tokens_per_s.append(sum(sample.num_tokens for sample in samples) / seconds)
            self.step_s.append(step_s)
        tensors = {name: tensor.clone() for name, tensor in self.learner.weights().items()}
        dtype = str(self.learner.policy.module.dtype).removeprefix("torch.")
        probe = WeightProbe(self.learner, dtype, exact=self.is_exact).make()
        await self.engine.update_weights(tensors, self.learner.version, "recompute", probe)

    def _train(self, samples: list[TrainSample]) -> float:
        began = time.perf_counter()
        cutter = self.learner.cutter()
        for sample in samples:
            if (micro_batch := cutter.add(sample)) is not None:
                self.learner.forward_backward(micro_batch)
        if rest := cutter.flush():
            self.learner.forward_backward(rest)
        self.metrics = self.learner.step()
        return time.perf_counter() - began


async def play(engine: HFEngine, prompt: list[int], name: str) -> TrainSample:
    """Play a conversation of two turns; return it as a sample with the engine's logprobs."""
    rng = np.random.default_rng(list(name.encode()))
    tokens = list(prompt)
    logprobs = [0.0] * len(prompt)
    mask = [0] * len(prompt)
    for turn in range(2):
        sampling = wire.SamplingParams(
            max_tokens=int(rng.integers(8, 33)), ignore_eos=True, seed=int(rng.integers(2**31))
        )
        request = wire.GenerateRequest(
            request_id=f"{name}-{turn}",
            conversation_id=name,
            token_ids=wire.column(tokens, "<i4"),
            sampling=sampling,
        )
        output = await engine.generate(request)
        assert output.token_ids, output.error
        question = rng.integers(3, 90, QUESTION).tolist() if turn == 0 else []
        tokens += [*output.token_ids, *question]
        logprobs += [*output.logprobs, *(0.0 for _ in question)]
        mask += [1] * len(output.token_ids) + [0] * len(question)
    mask_array = np.array(mask, np.uint8)
    advantage = rng.choice([-1.0, 1.0])
    return TrainSample(
        token_ids=np.array(tokens, np.int32),
        loss_mask=mask_array,
        rollout_logprobs=np.array(logprobs, np.float32),
        versions=np.where(mask_array, engine.policy_version, -1).astype(np.int32),
        advantages=(advantage * mask_array).astype(np.float32),
        group=1,
        reward=0.0,
    )


def make_prompts(number: int, vocab_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Return prompts in groups that are equal, of different lengths, with one beginning."""
    beginning = rng.integers(3, vocab_size, BEGINNING).tolist()
    prompts: list[list[int]] = []
    while len(prompts) < number:
        rest = rng.integers(3, vocab_size, int(rng.integers(5, 126))).tolist()
        prompts += [beginning + rest] * GROUP_SIZE
    return prompts[:number]


def open_pair(folder: str, options: argparse.Namespace, *, is_exact: bool) -> EngineLearnerPair:
    """Load an engine and a learner."""
    section = RolloutSection(
        max_running=options.requests,
        max_context_tokens=MAX_CONTEXT,
        num_threads=options.threads,
        exact=is_exact,
    )
    config = EngineConfig(folder, section, dtype=options.dtype, device="cpu", policy_version=0)
    train = TrainSection.model_validate(
        {"device": "cpu", "lr": 1e-4, "num_threads": options.threads}
    )
    learner = TorchBackend(
        folder,
        train=train,
        algorithm=AlgorithmSection(),
        model=ModelSection(dtype=options.dtype),
        seed=0,
        max_context=MAX_CONTEXT,
        exact=is_exact,
    )
    return EngineLearnerPair(HFEngine(config), learner, is_exact)


async def measure(folder: str, vocab_size: int, options: argparse.Namespace) -> dict[str, object]:
    """Return the figures of the last line."""
    pairs = [open_pair(folder, options, is_exact=is_exact) for is_exact in (True, False)]
    for pair in pairs:
        await pair.engine.start()
    rng = np.random.default_rng(0)
    for turn in range(options.pairs + 1):
        prompts = make_prompts(options.requests, vocab_size, rng)
        for pair in pairs if turn % 2 else reversed(pairs):
            await pair.take_turn(prompts, is_measured=turn > 0)
    for pair in pairs:
        await pair.engine.close()
        pair.learner.close()
    exact, ordinary = pairs
    equal = np.concatenate(exact.differences) == 0
    others = np.concatenate(ordinary.differences)
    rates = zip(exact.tokens_per_s, ordinary.tokens_per_s, strict=True)
    steps = zip(exact.step_s, ordinary.step_s, strict=True)
    return {
        "equal": bool(equal.all()),
        "tokens": len(equal),
        "is_mean": exact.metrics["rollout_corr/is_mean"],
        "kl": abs(exact.metrics["rollout_corr/kl"]),
        "ordinary_equal": round(float((others == 0).mean()), 3),
        "ordinary_largest": float(np.abs(others).max()),
        "cost": {
            "tokens_per_s": round(statistics.median(a / b for a, b in rates), 3),
            "step_s": round(statistics.median(a / b for a, b in steps), 3),
        },
        "dtype": options.dtype,
        "threads": options.threads,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pairs", type=int, default=5)
    add("--requests", type=int, default=32)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        vocab_size = make_model(folder, options.hidden, options.layers)
        figures = asyncio.run(measure(folder, vocab_size, options))
    print(json.dumps(figures))
    return 0 if figures["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
