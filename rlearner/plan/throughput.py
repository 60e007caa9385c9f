"""How fast a layout trains and generates, by operations and bytes, at assumed shares of the
hardware's peaks. Pure.

The shares are assumptions, not measurements: they rank layouts, and are off by a factor of two in
either direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rlearner.plan.facts import ModelFacts, ServeFacts, StepFacts, TrainFacts
from rlearner.plan.serving_memory import ServerLayout, slot_bytes
from rlearner.plan.training_memory import LearnerLayout

PEAK_FLOPS: Final = 989e12  # of an H100, dense bf16; float32 at an eighth
BANDWIDTH: Final = 3.35e12  # of its memory
TRAIN_SHARE: Final = 0.4
DECODE_SHARE: Final = {"hf": 0.15}  # of the bandwidth; other engines:
DECODE_DEFAULT: Final = 0.5
NVLINK: Final = 200e9  # bytes a second of a collective in one host
NETWORK: Final = 25e9  # between hosts
PCIE: Final = 25e9
HOST_MEMORY: Final = 50e9  # of an optimizer in host memory, for each rank
UPDATE_BYTES: Final = 28  # that AdamW reads and writes per parameter
ASSUMPTIONS: Final = (
    f"{PEAK_FLOPS / 1e12:g} TFLOP/s (bf16; float32 an eighth) of which training uses {TRAIN_SHARE:.0%}; "
    f"{BANDWIDTH / 1e12:g} TB/s of which decoding uses {DECODE_DEFAULT:.0%} ({DECODE_SHARE['hf']:.0%} with hf); "
    f"collectives at {NVLINK / 1e9:g} GB/s in a host, {NETWORK / 1e9:g} between hosts; sequences half as long as the "
    "context, half of that generated"
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds that one optimizer step takes the learner, and the servers; both work at the same
    time unless shared.
    """

    train_s: float
    generate_s: float
    shared: bool = False

    @property
    def step_s(self) -> float:
        return self.train_s + self.generate_s if self.shared else max(self.train_s, self.generate_s)


def train_seconds(
    model: ModelFacts, train: TrainFacts, step: StepFacts, layout: LearnerLayout, hosts: int
) -> float:
    """Return the seconds of a step's passes, collectives and update.

    Args:
        hosts: over which the learner's ranks are spread.
    """
    passes = step.passes * (
        (8 if layout.checkpointing else 6) + 2 * train.reference + 6 * train.critic
    )
    if train.lora_parameters:
        passes -= 2 * step.passes  # frozen weights have no gradient
    tokens = step.sequences * step.length
    turns = max(1, math.ceil(tokens / train.slice_tokens / layout.copies))
    # where there are fewer slices than ranks, they are cut smaller
    each = tokens / layout.copies / turns
    waiting = (
        1.0
        if layout.pipeline == 1
        else (4 * layout.pipeline + layout.pipeline - 1) / (4 * layout.pipeline)
    )
    peak = PEAK_FLOPS * TRAIN_SHARE / (8 if model.itemsize == 4 else 1)
    computing = turns * each * passes * model.active / layout.parts / peak * waiting
    link = NVLINK if hosts == 1 else NETWORK
    trained = train.lora_parameters or model.parameters
    return (
        computing
        + _collectives(model, layout, turns, each, trained) / link
        + _update(trained, layout)
    )


def _collectives(
    model: ModelFacts, layout: LearnerLayout, turns: int, each: float, trained: int
) -> float:
    """Return the bytes that one rank sends in a step."""
    if layout.ranks == 1:
        return 0.0
    whole = model.parameters * model.itemsize
    # weights for both passes, gradients after each
    if layout.backend == "fsdp2" or layout.stage == 3:
        return turns * (2.0 * whole + 4.0 * trained)
    if layout.backend == "deepspeed":
        return turns * 4.0 * trained * (2 if layout.stage == 1 else 1) + trained * model.itemsize
    reduced = 2.0 * 4.0 * trained / layout.parts if layout.copies > 1 else 0.0
    crossing = 0.0
    if layout.tensor > 1:  # two all-reduces of the residual stream in each block and direction
        crossing = (
            turns * 8.0 * each * model.activations.stream * len(model.blocks) / layout.pipeline
        )
    return reduced + crossing


def _update(trained: int, layout: LearnerLayout) -> float:
    over = trained / layout.over[2]
    if layout.offload:
        return over * (UPDATE_BYTES / HOST_MEMORY + 6 / PCIE)
    return over * UPDATE_BYTES / BANDWIDTH


def generate_seconds(
    model: ModelFacts,
    serve: ServeFacts,
    step: StepFacts,
    layout: ServerLayout,
    servers: int,
    running: int,
) -> float:
    """Return the seconds in which all servers generate one step's sequences."""
    if not running:
        return math.inf
    at_once = min(running, max(1, math.ceil(step.sequences / servers)))
    read = model.active * model.itemsize / layout.tensor
    read += at_once * slot_bytes(model, 1, layout.tensor) * step.length
    bytes_s = read / (BANDWIDTH * DECODE_SHARE.get(serve.engine, DECODE_DEFAULT))
    flops_s = 2.0 * model.active * at_once / layout.tensor / (PEAK_FLOPS * TRAIN_SHARE)
    return step.sequences * step.generated * max(bytes_s, flops_s) / (at_once * servers)
