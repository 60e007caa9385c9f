"""What there is to choose from: layouts of the learner and of servers on a number of GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Final

from learner.backends.megatron.architecture import SUPPORTED
from rlearner.plan.demands import Demands
from rlearner.plan.facts import Machine, ModelFacts
from rlearner.plan.serving_memory import ServerLayout
from rlearner.plan.training_memory import LearnerLayout

POWERS: Final = (1, 2, 4, 8)
BOTH: Final = (False, True)


def learner_layouts(model: ModelFacts, demands: Demands, machine: Machine, ranks: int) -> Iterator[LearnerLayout]:
    """Yield the layouts on ``ranks`` GPUs that the configuration leaves open."""
    if not demands.allows(train__ranks=ranks):
        return
    for checkpointing, offload in product(BOTH, BOTH):
        if not demands.allows(train__gradient_checkpointing=checkpointing):
            continue
        if demands.allows(train__optimizer_offload=offload):
            for backend in ("torch",) if ranks == 1 else ("ddp", "fsdp2"):
                if demands.allows(train__backend=backend):
                    yield LearnerLayout(backend, ranks, checkpointing=checkpointing, offload=offload)
            if ranks > 1 and model.architecture in SUPPORTED and demands.allows(train__backend="megatron"):
                for tensor, pipeline in _divisions(model, demands, machine, ranks):
                    yield LearnerLayout("megatron", ranks, 0, tensor, pipeline, checkpointing, offload)
        zero = demands.allows(train__backend="deepspeed", train__deepspeed__offload_optimizer=offload)
        for stage in (1, 2, 3) if zero and ranks > 1 else ():
            if demands.allows(train__deepspeed__stage=stage):
                yield LearnerLayout("deepspeed", ranks, stage, checkpointing=checkpointing, offload=offload)


def _divisions(model: ModelFacts, demands: Demands, machine: Machine, ranks: int) -> Iterator[tuple[int, int]]:
    for tensor, pipeline in product(POWERS, POWERS):
        fits = not ranks % (tensor * pipeline) and tensor <= machine.per_host and tensor * pipeline > 1
        divides = not (model.heads % tensor or model.kv_heads % tensor or len(model.blocks) % pipeline)
        named = {"train__megatron__tensor_parallel": tensor, "train__megatron__pipeline_parallel": pipeline}
        if fits and divides and demands.allows(**named):
            yield tensor, pipeline


def server_layouts(model: ModelFacts, demands: Demands, machine: Machine) -> Iterator[ServerLayout]:
    """Yield how one server may be divided."""
    assert demands.serve is not None
    for tensor in POWERS if demands.serve.engine != "hf" else (1,):
        fits = tensor <= machine.per_host and not model.heads % tensor
        if fits and demands.allows(rollout__engine_args__tensor_parallel=tensor):
            yield ServerLayout(tensor)


def count_servers(machine: Machine, first: int, last: int, tensor: int) -> int:
    """Return how many servers of ``tensor`` GPUs fit on GPUs from ``first`` to before ``last``, none across hosts."""
    hosts = range(machine.hosts)
    spans = [(max(first, host * machine.per_host), min(last, (host + 1) * machine.per_host)) for host in hosts]
    return sum(max(0, stop - start) // tensor for start, stop in spans)
