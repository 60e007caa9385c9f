"""Compare ``rlearner plan``'s memory with what torch's MemTracker counts in real steps, and the KV
cache of engine hf.

    python -m bench.plan [--largest 400] [--quick]

Each case builds a model of 0.5 to 400 million parameters, trains one step of several micro-batches
with the backend ``torch`` on this CPU, and compares the most bytes of tensors alive with the plan's
sum of all parts. ``plan_error``: the largest difference by the measured bytes; ``kv_error``: the
same of the cache that the engine ``hf`` allocates. The last line is one JSON object. ``--quick``
leaves out models above 10 million. 400 million need 10 GiB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from bench.gpu import common
from bench.gpu.learner import sample
from learner.algorithm.samples import TrainSample
from learner.backends.models import attention, token_scores
from learner.backends.torch import TorchBackend
from learner.config import AlgorithmSection, LoraSection, TrainSection
from rlearner.plan.demands import lora_parameters
from rlearner.plan.facts import Machine, ModelFacts, ServeFacts, TrainFacts
from rlearner.plan.model_reader import read_folder
from rlearner.plan.serving_memory import ServerLayout, server_memory
from rlearner.plan.training_memory import LearnerLayout, learner_memory
from rlearner_text.config import ModelSection
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig

SHAPES: Final[Mapping[str, common.ModelShape]] = {  # by millions of parameters
    "0.5": common.ModelShape(96, 4, 4, 2, 32, 256, 1024, 2048),
    "10": common.ModelShape(256, 10, 4, 2, 64, 768, 8192, 2048),
    "100": common.ModelShape(768, 12, 12, 4, 64, 2048, 32_000, 2048),
    "400": common.ModelShape(1024, 24, 16, 8, 64, 3072, 100_000, 2048),
}
KV_CONTEXT: Final = 256


@dataclass(frozen=True)
class Case:
    """One training step: micro-batches of ``slices`` sequences of ``length`` tokens each, the last
    one half as full.
    """

    size: str
    dtype: str = "float32"
    length: int = 128
    sequences: int = 4
    train: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The case in one word."""
        kl = ["reference"] if self.algorithm.get("kl_coef") else []
        critic = ["critic"] if self.algorithm.get("critic") else []
        return "-".join(
            [
                f"{self.size}M",
                self.dtype,
                f"{self.length}x{self.sequences}",
                *self.train,
                *kl,
                *critic,
            ]
        )


def cases(sizes: Sequence[str]) -> Iterator[Case]:
    """Yield the cases of models of these sizes; the largest have the fewest."""
    checkpointing = {"gradient_checkpointing": True}
    offload = {"optimizer_offload": True}
    for size in sizes:
        for dtype in ("float32", "bfloat16"):
            yield Case(size, dtype)
            yield Case(size, dtype, train=checkpointing)
            if size in ("0.5", "10"):
                yield Case(size, dtype, length=500, sequences=2, train=offload)
                yield Case(size, dtype, train=checkpointing | offload, length=40, sequences=9)
                yield Case(size, dtype, algorithm={"kl_coef": 0.1})
                yield Case(
                    size, dtype, algorithm={"critic": {"enabled": True}, "adv_estimator": "gae"}
                )
                yield Case(size, dtype, train={"lora": {"rank": 8}})


class StepTracker(MemTracker):  # type: ignore[no-untyped-call]
    """torch's tracker without statistics of modules, which allow only one pass of each, and no
    frozen weights.
    """

    def _pre_fw_hook(self, module: Any, inputs: Any) -> None:
        pass

    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None:
        pass

    def _pre_bw_hook(self, module: Any, args: Any) -> None:
        pass

    def _post_bw_hook(self, module: Any, args: Any) -> None:
        pass


def error_of(case: Case) -> tuple[float, float, float]:
    """Return the plan's error by the measured bytes, the planned and the measured bytes."""
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, SHAPES[case.size], dtype=case.dtype)
        planned = plan_step(case, read_folder(Path(model), case.size, _section(case), _lora(case)))
        measured = measure_step(case, model)
    return abs(planned - measured) / measured, planned, measured


def plan_step(case: Case, model: ModelFacts) -> float:
    """Return the bytes that the plan expects, of device and host together, which are one on a CPU."""
    tokens = case.sequences * (case.length - 1)
    train = TrainFacts(
        tokens, critic="critic" in case.algorithm, logit_block=token_scores.BLOCK_BYTES["cpu"]
    )
    if (lora := _lora(case)) is not None:
        train = replace(train, lora_parameters=lora_parameters(lora, model))
    train = replace(
        train, reference=bool(case.algorithm.get("kl_coef")) and "lora" not in case.train
    )
    offload = bool(case.train.get("optimizer_offload"))
    checkpointing = bool(case.train.get("gradient_checkpointing"))
    memory = learner_memory(
        model, train, LearnerLayout("torch", checkpointing=checkpointing, offload=offload)
    )
    return memory.total() + memory.total("host")


def measure_step(case: Case, model: str) -> float:
    """Return the most bytes of tensors alive during one step of the backend ``torch``."""
    tokens = case.sequences * (case.length - 1)
    train = {"device": "cpu", "lr": 1e-6, "num_threads": 1, "micro_batch_tokens": tokens} | dict(
        case.train
    )
    algorithm = AlgorithmSection.model_validate(dict(case.algorithm))
    settings = TrainSection.model_validate(train)
    backend = TorchBackend(model, train=settings, algorithm=algorithm, model=_section(case), seed=0)
    try:
        rng = np.random.default_rng(0)
        vocab = SHAPES[case.size].vocab
        samples = [sample(case.length, vocab, rng) for _ in range(2 * case.sequences)]
        tracker = StepTracker()
        tracker.track_external(*_held(backend))
        # the float32 copies that only a CPU makes are not planned
        with tracker, mock.patch.object(attention, "FLOAT32_KEYS", 0):
            _step(backend, samples)
        return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        backend.close()


def _held(backend: TorchBackend) -> list[Any]:
    """Return modules and tensors that exist before the step."""
    models = backend.worker.models
    found: list[Any] = [models.policy.module, *backend.worker.optimizer.tensors()]
    if (module := getattr(models.ref, "module", None)) is not None:
        found.append(module)
    if models.critic is not None:
        found += [models.critic.module, *models.critic.optimizer.tensors()]
    distinct: dict[int, Any] = {}
    for one in found:
        distinct.setdefault(
            one.untyped_storage()._cdata if isinstance(one, Tensor) else id(one), one
        )
    return list(distinct.values())


def _step(backend: TorchBackend, samples: Sequence[TrainSample]) -> None:
    if backend.worker.models.critic is not None:
        backend.update(
            [replace(one, values=one.advantages * 0, returns=one.advantages) for one in samples]
        )
        return
    cutter = backend.cutter()
    for one in samples:
        if (full := cutter.add(one)) is not None:
            backend.forward_backward(full)
    if rest := cutter.flush():
        backend.forward_backward(rest)
    backend.step()


def kv_error(size: str = "0.5", slots: int = 6) -> float:
    """Return the plan's error by the bytes of the cache that engine hf allocates for ``slots``
    conversations.
    """
    from rollout.engines.hf.model import SlotModel

    with tempfile.TemporaryDirectory() as folder:
        path = common.make_model(folder, SHAPES[size])
        facts = read_folder(Path(path), size, ModelSection.model_validate({"dtype": "bfloat16"}))
        section = RolloutSection(engine="hf", max_running=slots // 2, max_context_tokens=KV_CONTEXT)
        engine = SlotModel(EngineConfig(path, section, "bfloat16", device="cpu"))
        attention = engine.attention
        tensors = [*attention._keys.values(), *attention._values.values()]
        engine.close()
    measured = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    serve = ServeFacts("hf", slots // 2, KV_CONTEXT, 64, slots)
    parts = server_memory(facts, serve, ServerLayout(), Machine(1, 80 * 2**30)).memory.parts
    planned = next(part.size for part in parts if part.name == "KV cache")
    return abs(planned - measured) / measured


def measure(sizes: Sequence[str]) -> dict[str, Any]:
    """Return the figures of models of these sizes, printing a line for each case."""
    errors: dict[str, float] = {}
    for case in cases(sizes):
        began = time.perf_counter()
        errors[case.name], planned, measured = error_of(case)
        took = time.perf_counter() - began
        line = f"{case.name:<60} planned {planned / 2**20:9.2f} MiB, measured {measured / 2**20:9.2f} MiB"
        print(f"{line}, error {errors[case.name]:.2%} ({took:.1f} s)", flush=True)
    worst = max(errors, key=errors.__getitem__)
    figures = {
        "plan_error": round(errors[worst], 4),
        "plan_worst": worst,
        "plan_cases": len(errors),
    }
    return figures | {"kv_error": round(max(kv_error(size) for size in sizes if size != "400"), 4)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--largest",
        choices=list(SHAPES),
        default="400",
        help="millions of parameters (%(default)s)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="models up to 10 million parameters only"
    )
    options = parser.parse_args(arguments)
    names = list(SHAPES)
    sizes = names[: names.index("10" if options.quick else options.largest) + 1]
    figures = measure(sizes)
    print(json.dumps({"bench": "bench.plan", "models": sizes} | figures))
    return 0 if figures["plan_error"] <= 0.1 and figures["kv_error"] <= 0.1 else 1


def _lora(case: Case) -> LoraSection | None:
    return LoraSection.model_validate(case.train["lora"]) if "lora" in case.train else None


def _section(case: Case) -> ModelSection:
    return ModelSection.model_validate({"dtype": case.dtype})


if __name__ == "__main__":
    sys.exit(main())
