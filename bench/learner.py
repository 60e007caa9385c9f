"""Compare a learner's step with bare torch on the same packed rows: the quickstart's model, 10 M
and 100 M parameters.

    python -m bench.learner [--only quickstart,10m,100m]

Ours is a step of ``learner.training.TrainingThread``: groups in, assembly, advantages,
micro-batches, packed rows, forward and backward pass, loss, clipping, AdamW, metrics out. Bare is a
loop of a dozen lines over the finished tensors of the same rows: transformers' model with the same
attention, logits of the sampled tokens only (``logits_to_keep``), ``cross_entropy``, ``backward``,
and at the end torch's fused AdamW without clipping. Both have the same weights and threads, in one
thread of one process for each model, interleaved. Every group has unequal rewards, so that every
row is trained, and its episodes share their prompt, which a row has once. ``share`` is the median
over the pairs of bare seconds by our seconds, ``cpu_share`` that of processor seconds, which other
work on the machine disturbs less. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from bench.gpu.common import ModelShape, make_model
from bench.plan import SHAPES
from bench.support.paired import interval, median
from broker.contract import wire
from broker.settings.registry import resolve
from learner.algorithm.advantages import ADVANTAGES
from learner.algorithm.assembly import SampleAssembler
from learner.backends.models.attention_trial import choose_attention
from learner.backends.models.batch import TokenBatch
from learner.backends.models.policy import load_model
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, TrainSection
from learner.training import TrainingThread
from rlearner_text.config import ModelSection

STAGES_REPEATS: Final = 2
MIN_PAIRS: Final = 3
MAX_PAIRS: Final = 25
# of an episode: tokens read and sampled in turn
Lengths = Callable[[np.random.Generator], list[int]]


@dataclass(frozen=True)
class Case:
    """One model and the groups of its step."""

    shape: ModelShape
    num_groups: int
    group_size: int
    num_threads: int  # train.num_threads, 0 for torch's default
    lengths: Lengths
    seconds: float = 35.0  # of pairs, at least MIN_PAIRS


def _lake(rng: np.random.Generator) -> list[int]:
    """Up to ten turns of an observation and two sampled tokens, as the quickstart's."""
    turns = min(10, int(rng.integers(1, 16)))
    return [31, 2] + [11, 2] * (turns - 1)


def _answer(rng: np.random.Generator) -> list[int]:
    """A question and an answer with a long tail."""
    return [int(rng.integers(24, 96)), min(480, int(rng.lognormal(4.6, 0.7)) + 4)]


QUICKSTART: Final = ModelShape(128, 3, 2, 2, 64, 384, 102, 4096)
CASES: Final[Mapping[str, Case]] = {
    "quickstart": Case(QUICKSTART, 16, 8, 1, _lake),
    "10m": Case(SHAPES["10"], 3, 8, 0, _answer),
    "100m": Case(SHAPES["100"], 1, 6, 0, _answer, 60.0),
}


def made_up_groups(case: Case, rng: np.random.Generator) -> list[wire.Group]:
    """Return the groups of a step; half of each group's episodes succeed."""
    return [
        wire.Group(
            ticket=number,
            domain="made-up",
            task_index=number,
            min_version=0,
            hub="made-up",
            deliveries=1,
            pools=[],
            trajectories=[
                _trajectory(case, episode, prompt, rng) for episode in range(case.group_size)
            ],
        )
        for number in range(1, case.num_groups + 1)
        for prompt in [rng.integers(3, case.shape.vocab, case.lengths(rng)[0])]
    ]


def _trajectory(
    case: Case, episode: int, prompt: npt.NDArray[np.int64], rng: np.random.Generator
) -> wire.Trajectory:
    spans = [len(prompt), *case.lengths(rng)[1:]]
    ends = np.cumsum(spans).tolist()
    mask = np.repeat(np.arange(len(spans)) % 2, spans).astype(np.uint8)
    token_ids = np.append(prompt, rng.integers(3, case.shape.vocab, len(mask) - len(prompt)))
    logprobs = np.where(mask, -np.log(case.shape.vocab), 0.0)
    reward = float(episode % 2)
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column(token_ids, "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column(logprobs, "<f4"),
        version_runs=wire.column([0, int(mask.sum())], "<i4"),
        turns=[
            wire.Turn(
                start=start, end=end, reward=0.0, valid=True, finish_reason="stop", server="made-up"
            )
            for start, end in zip(ends[::2], ends[1::2], strict=True)
        ],
        reward=reward,
        reward_parts={"env": reward},
        success=reward > 0,
        end="terminated",
    )


class BareTorch:
    """Forward and backward passes over finished rows, and AdamW."""

    def __init__(self, path: str, train: TrainSection, rows: Sequence[TokenBatch]) -> None:
        device = torch.device("cpu")
        self._model = load_model(path, ModelSection(), device)
        self._rows = rows
        if problem := choose_attention(self._model, device, path, packed=True):
            raise RuntimeError(problem)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=train.lr, betas=train.betas, fused=True
        )

    def step(self) -> float:
        """Make one step; return the seconds of the optimizer's update."""
        for row in self._rows:
            logits = self._model(
                **row.inputs(), logits_to_keep=row.predictors, use_cache=False
            ).logits[0]
            functional.cross_entropy(logits, row.targets, reduction="sum").backward()  # type: ignore[no-untyped-call]
        began = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - began


class LearnerStep:
    """The learner's step over the same groups again and again."""

    def __init__(
        self, training: TrainingThread, backend: TorchBackend, groups: Sequence[wire.Group]
    ) -> None:
        self._training = training
        self._backend = backend
        self.groups = groups

    async def run(self) -> dict[str, float]:
        for one in self.groups:
            self._training.add(one)
        result = await self._training.finish(self._backend.version)
        assert result is not None, "it was not abandoned"
        return result.values

    async def rows(self) -> list[TokenBatch]:
        """Take a step; return the rows that it ran."""
        passes = self._backend.worker.passes
        rows = list[TokenBatch]()
        collate = passes.collate

        def recorded(samples: Any) -> TokenBatch:
            rows.append(collate(samples))
            return rows[-1]

        passes.collate = recorded  # type: ignore[method-assign]
        try:
            await self.run()
        finally:
            passes.collate = collate  # type: ignore[method-assign]
        return rows


@dataclass
class Taken:
    """Wall and processor seconds of the runs of one side."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)  # wall seconds without the optimizer

    async def run(self, work: Callable[[], Awaitable[float]]) -> None:
        began = time.perf_counter()
        began_cpu = time.process_time()
        update_s = await work()
        self.wall.append(time.perf_counter() - began)
        self.cpu.append(time.process_time() - began_cpu)
        self.passes.append(self.wall[-1] - update_s)


async def measure(name: str, case: Case, folder: str) -> dict[str, Any]:
    """Return the figures of a case."""
    path = make_model(Path(folder) / name, case.shape, dtype="float32")
    train = TrainSection.model_validate(
        {"device": "cpu", "lr": 1e-5, "num_threads": case.num_threads}
    )
    algorithm = AlgorithmSection()
    model = ModelSection()
    estimator = resolve("advantages", algorithm.adv_estimator, ADVANTAGES)

    def build() -> TorchBackend:
        return TorchBackend(path, train=train, algorithm=algorithm, model=model, seed=0)

    training = TrainingThread(build, estimator, algorithm)
    backend = await training.open()
    assert isinstance(backend, TorchBackend)
    ours = LearnerStep(training, backend, made_up_groups(case, np.random.default_rng(0)))
    rows = await ours.rows()
    bare = await training.call(lambda: BareTorch(path, train, rows))

    async def bare_step() -> float:
        return await training.call(bare.step)

    async def our_step() -> float:
        await ours.run()
        return 0.0

    await bare_step()
    sides = [(Taken(), bare_step), (Taken(), our_step)]
    began = time.perf_counter()
    pairs = 0
    while pairs < MIN_PAIRS or (pairs < MAX_PAIRS and time.perf_counter() - began < case.seconds):
        for taken, work in sides if pairs % 2 else sides[::-1]:
            await taken.run(work)
        pairs += 1
    stages = await training.call(lambda: _stages(backend, estimator, ours.groups))
    threads = await training.call(torch.get_num_threads)
    training.close()
    return _shares(sides[0][0], sides[1][0]) | {
        "stages_ms": stages,
        "parameters": sum(one.numel() for one in backend.policy.module.parameters()),
        "tokens_read": sum(row.input_ids.numel() for row in rows),
        "tokens_trained": sum(len(row.targets) for row in rows),
        "rows": len(rows),
        "threads": threads,
        "pairs": pairs,
    }


def _shares(bare: Taken, ours: Taken) -> dict[str, Any]:
    def share(of: Sequence[float], by: Sequence[float]) -> list[float]:
        return [one / other for one, other in zip(of, by, strict=True)]

    low, high = interval(share(bare.wall, ours.wall))
    return {
        "share": round(median(share(bare.wall, ours.wall)), 3),
        "low": round(low, 3),
        "high": round(high, 3),
        "cpu_share": round(median(share(bare.cpu, ours.cpu)), 3),
        "share_without_update": round(median(share(bare.passes, ours.wall)), 3),
        "ours_ms": round(median(ours.wall) * 1000, 1),
        "bare_ms": round(median(bare.wall) * 1000, 1),
    }


def _stages(
    backend: TorchBackend, estimator: Any, groups: Sequence[wire.Group]
) -> dict[str, float]:
    """Return the milliseconds of a step's stages, each timed by itself, medians."""
    passes = backend.worker.passes
    assembler = SampleAssembler(estimator, AlgorithmSection())
    found = list[dict[str, float]]()
    for _ in range(STAGES_REPEATS):
        clock = StageClock()
        samples = [one for each in groups for one in assembler.stream(each)]
        clock.lap("assembly")
        for piece in (
            piece for micro in _micro_batches(backend, samples) for piece in passes.slices(micro)
        ):
            batch = passes.collate(piece)
            clock.lap("rows")
            features = backend.policy.features(batch)
            clock.lap("trunk")
            ends = features.detach().requires_grad_()
            logprobs, entropy = backend.policy.score_features(ends, batch)
            clock.lap("head")
            total, sums = passes.objective(batch, logprobs, entropy, None, kl_coef=0.0, version=0)
            clock.lap("loss")
            total.backward()  # type: ignore[no-untyped-call]
            clock.lap("head_backward")
            features.backward(ends.grad)  # type: ignore[no-untyped-call]
            clock.lap("trunk_backward")
            passes.sums_of(batch, sums)
            clock.lap("sums")
        backend.worker.step(1.0, 0, 1)
        clock.lap("optimizer")
        found.append(clock.taken)
    return {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}


class StageClock:
    """Sums of the milliseconds between laps, by name."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.taken[name] = self.taken.get(name, 0.0) + (now - self._last) * 1000
        self._last = now


def _micro_batches(backend: TorchBackend, samples: Sequence[Any]) -> list[list[Any]]:
    cutter = backend.cutter()
    found = [full for one in samples if (full := cutter.add(one)) is not None]
    return found + ([rest] if (rest := cutter.flush()) else [])


def run_case(name: str) -> dict[str, Any]:
    """Measure a case in a process of its own, because threads are set for a whole process."""
    command = [sys.executable, "-m", "bench.learner", "--case", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(CASES), help="models, with commas (%(default)s)")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(asyncio.run(measure(options.case, CASES[options.case], folder))))
        return
    figures: dict[str, Any] = {}
    for name in options.only.split(","):
        figures[name] = run_case(name)
        print(f"{name}: {json.dumps(figures[name])}", flush=True)
    print(
        json.dumps({f"share_{name}": found["share"] for name, found in figures.items()} | figures)
    )


if __name__ == "__main__":
    main()
