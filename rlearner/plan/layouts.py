"""What there is to choose from: layouts of the learner and of servers on a number of GPUs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Final

from learner.backends.megatron.architecture import SUPPORTED
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine, ModelFacts
from rlearner.plan.serving_memory import ServerLayout
from rlearner.plan.training_memory import LearnerLayout

# Up to this, all numbers of ranks are tried; of larger ones as many again, evenly spread.
DENSE: Final = 64
POWERS: Final = (1, 2, 4, 8)
BOOLEANS: Final = (False, True)
# Megatron and DeepSpeed have further choices.
ONE_RANK_BACKENDS: Final = ("torch",)
RANKS_BACKENDS: Final = ("ddp", "fsdp2")


def learner_layouts(
    model: ModelFacts, demands: Demands, machine: Machine, ranks: int
) -> Iterator[LearnerLayout]:
    """Yield the layouts on ``ranks`` GPUs that the configuration leaves open."""
    if not demands.allows(train__ranks=ranks):
        return
    for checkpointing, offload in product(BOOLEANS, BOOLEANS):
        if not demands.allows(train__gradient_checkpointing=checkpointing):
            continue
        if demands.allows(train__optimizer_offload=offload):
            for backend in ONE_RANK_BACKENDS if ranks == 1 else RANKS_BACKENDS:
                if demands.allows(train__backend=backend):
                    yield LearnerLayout(
                        backend, ranks, checkpointing=checkpointing, offload=offload
                    )
            if (
                ranks > 1
                and model.architecture in SUPPORTED
                and demands.allows(train__backend="megatron")
            ):
                for tensor, pipeline in _megatron_divisions(model, demands, machine, ranks):
                    yield LearnerLayout(
                        "megatron",
                        ranks,
                        tensor=tensor,
                        pipeline=pipeline,
                        checkpointing=checkpointing,
                        offload=offload,
                    )
        zero = demands.allows(
            train__backend="deepspeed", train__deepspeed__offload_optimizer=offload
        )
        for stage in (1, 2, 3) if zero and ranks > 1 else ():
            if demands.allows(train__deepspeed__stage=stage):
                yield LearnerLayout(
                    "deepspeed", ranks, stage, checkpointing=checkpointing, offload=offload
                )


def _megatron_divisions(
    model: ModelFacts, demands: Demands, machine: Machine, ranks: int
) -> Iterator[tuple[int, int]]:
    sizes = [
        _parallel_sizes(demands, f"train.megatron.{key}_parallel") for key in ("tensor", "pipeline")
    ]
    for tensor, pipeline in product(*sizes):
        fits = (
            not ranks % (tensor * pipeline) and tensor <= machine.per_host and tensor * pipeline > 1
        )
        divides = not (
            model.heads % tensor or model.kv_heads % tensor or len(model.blocks) % pipeline
        )
        if fits and divides:
            yield tensor, pipeline


def server_layouts(model: ModelFacts, demands: Demands, machine: Machine) -> Iterator[ServerLayout]:
    """Yield how one server may be divided."""
    assert demands.serve is not None
    sizes: tuple[int, ...] = (1,)  # engine hf has no tensor parallelism
    if demands.serve.engine != "hf":
        sizes = _parallel_sizes(demands, "rollout.engine_args.tensor_parallel")
    for tensor in sizes:
        if tensor <= machine.per_host and not model.heads % tensor:
            yield ServerLayout(tensor)


def _parallel_sizes(demands: Demands, key: str) -> tuple[int, ...]:
    return (demands.fixed[key],) if key in demands.fixed else POWERS


def rank_choices(demands: Demands, machine: Machine, most: int) -> list[int]:
    """Return the numbers of ranks to try, up to ``most``: all small ones, then whole hosts."""
    if (fixed := demands.fixed.get("train.ranks")) is not None:
        return [fixed] if fixed <= most else []
    # Larger learners take whole hosts, or multiples of eight GPUs.
    unit = min(machine.per_host, POWERS[-1])
    wholes = range(most // unit * unit, DENSE, -unit)
    step = max(1, math.ceil(len(wholes) / DENSE))
    return sorted({*range(1, min(most, DENSE) + 1), *wholes[::step], *[most] * (most > 0)})


def count_servers(machine: Machine, first: int, last: int, tensor: int) -> int:
    """Return how many servers fit on GPUs from ``first`` to before ``last``, none across hosts."""
    if first >= last:
        return 0
    per_host = machine.per_host
    begin = first // per_host
    end = (last - 1) // per_host
    if begin == end:
        return (last - first) // tensor
    return (
        (per_host - first % per_host) // tensor
        + (end - begin - 1) * (per_host // tensor)
        + (last - end * per_host) // tensor
    )
