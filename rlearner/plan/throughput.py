"""How fast a layout trains and generates, at assumed shares of the hardware's peaks. Pure.

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

# Of an H100, dense bf16; float32 at an eighth.
PEAK_FLOPS: Final = 989e12
# Of its memory.
BANDWIDTH: Final = 3.35e12
TRAIN_SHARE: Final = 0.4
# Of the bandwidth; engines not named here have the default.
DECODE_SHARE: Final = {"hf": 0.15}
DECODE_DEFAULT: Final = 0.5
# Bytes a second of a collective in one host, and between hosts.
NVLINK: Final = 200e9
NETWORK: Final = 25e9
PCIE: Final = 25e9
# Of an optimizer in host memory, for each rank.
HOST_MEMORY: Final = 50e9
# Bytes that AdamW reads and writes per parameter.
UPDATE_BYTES: Final = 28
ASSUMPTIONS: Final = (
    f"{PEAK_FLOPS / 1e12:g} TFLOP/s (bf16; float32 an eighth) "
    f"of which training uses {TRAIN_SHARE:.0%}; "
    f"{BANDWIDTH / 1e12:g} TB/s "
    f"of which decoding uses {DECODE_DEFAULT:.0%} ({DECODE_SHARE['hf']:.0%} with hf); "
    f"collectives at {NVLINK / 1e9:g} GB/s in a host, {NETWORK / 1e9:g} between hosts; "
    "sequences half as long as the context, half of that generated"
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step, which learner and servers take together unless shared."""

    train_s: float
    generate_s: float
    shared: bool = False

    @property
    def step_s(self) -> float:
        if self.shared:
            return self.train_s + self.generate_s
        return max(self.train_s, self.generate_s)


def train_seconds(
    model: ModelFacts, train: TrainFacts, step: StepFacts, layout: LearnerLayout, hosts: int
) -> float:
    """Return the seconds of a step's passes, collectives and update.

    Args:
        hosts: over which the learner's ranks are spread.
    """
    # Operations per parameter and token: 2 forward, 4 backward, 2 if the forward pass is repeated.
    operations = 6 + 2 * layout.checkpointing + 2 * train.reference + 6 * train.critic
    if train.lora_parameters:
        operations -= 2  # frozen weights have no gradient
    operations *= step.passes
    tokens = step.sequences * step.length
    turns = max(1, math.ceil(tokens / train.slice_tokens / layout.copies))
    # Where there are fewer slices than ranks, they are cut smaller.
    slice_tokens = tokens / layout.copies / turns
    # A pipeline of p stages idles for p - 1 slices of its 4p.
    waiting = (4 * layout.pipeline + layout.pipeline - 1) / (4 * layout.pipeline)
    peak = PEAK_FLOPS * TRAIN_SHARE
    if model.itemsize == 4:
        peak /= 8
    computing = turns * slice_tokens * operations * model.active / layout.parts / peak * waiting
    link = NVLINK if hosts == 1 else NETWORK
    trained = train.lora_parameters or model.parameters
    return (
        computing
        + _collective_bytes(model, layout, turns, slice_tokens, trained) / link
        + _update_seconds(trained, layout)
    )


def _collective_bytes(
    model: ModelFacts, layout: LearnerLayout, turns: int, slice_tokens: float, trained: int
) -> float:
    """Return the bytes that one rank sends in a step."""
    if layout.ranks == 1:
        return 0.0
    whole = model.parameters * model.itemsize
    # Weights for both passes, gradients after each.
    if layout.backend == "fsdp2" or layout.stage == 3:
        return turns * (2.0 * whole + 4.0 * trained)
    if layout.backend == "deepspeed":
        # Stage 1 keeps whole gradients, which take an all-reduce: twice the bytes.
        gradients = turns * 4.0 * trained * (1 + (layout.stage == 1))
        return gradients + trained * model.itemsize
    num_bytes = 0.0
    if layout.copies > 1:
        num_bytes += 2.0 * 4.0 * trained / layout.parts
    # Two all-reduces of the residual stream in each block and direction.
    if layout.tensor > 1:
        stream = slice_tokens * model.activations.stream
        num_bytes += turns * 8.0 * stream * len(model.blocks) / layout.pipeline
    return num_bytes


def _update_seconds(trained: int, layout: LearnerLayout) -> float:
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
    model = model.converted(serve.itemsize)
    at_once = min(running, max(1, math.ceil(step.sequences / servers)))
    read = model.active * model.itemsize / layout.tensor
    read += at_once * slot_bytes(model, 1, layout.tensor) * step.length
    bytes_s = read / (BANDWIDTH * DECODE_SHARE.get(serve.engine, DECODE_DEFAULT))
    flops_s = 2.0 * model.active * at_once / layout.tensor / (PEAK_FLOPS * TRAIN_SHARE)
    return step.sequences * step.generated * max(bytes_s, flops_s) / (at_once * servers)
