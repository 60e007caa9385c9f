"""Sizes that memory and speed are computed from: of a model, of a run, of a machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

GIB: Final = 2**30


@dataclass(frozen=True)
class ActivationFacts:
    """Bytes per token of a row that the model computes for training, traced without gradient checkpointing.

    Attributes:
        kept: saved by all blocks together for the backward pass.
        wide: the part of ``kept`` that is as wide as the residual stream, which tensor parallelism does not divide.
        outside: saved before the first block and after the last one.
        block: most that one block holds in its own forward and backward pass, without gradients of its weights.
        stream: the input of one block: all that gradient checkpointing keeps of it.
    """

    kept: float
    wide: float
    outside: float
    block: float
    stream: float


@dataclass(frozen=True)
class ModelFacts:
    """A causal language model.

    Attributes:
        itemsize: bytes per weight.
        blocks: parameters of each transformer block.
        embedding: parameters of the input embeddings, which are the output matrix, too, if ``tied``.
        outside: other parameters outside of blocks.
        largest: parameters of the largest tensor.
        active: parameters that one token is multiplied with; fewer than all in a mixture of experts.
        kv_bytes: keys and values of one token in all blocks.
        linears: inputs and outputs of each linear layer in the blocks.
    """

    path: str
    itemsize: int
    blocks: tuple[int, ...]
    embedding: int
    outside: int
    largest: int
    active: int
    tied: bool
    vocab: int
    heads: int
    kv_heads: int
    kv_bytes: int
    linears: tuple[tuple[int, int], ...]
    activations: ActivationFacts

    @property
    def parameters(self) -> int:
        return sum(self.blocks) + self.embedding + self.outside


@dataclass(frozen=True)
class TrainFacts:
    """What a run asks of its learner.

    Attributes:
        slice_tokens: tokens of the largest forward pass of one rank.
        lora_parameters: of the adapters; 0 if all weights are trained.
        reference: a second, frozen copy of the model.
        staging: bytes of one version of the weights as it is sent.
        staging_on_gpu: whether the sender holds its two buffers there.
    """

    slice_tokens: int
    lora_parameters: int = 0
    lora_bytes: float = 0.0  # kept per token by the adapters
    reference: bool = False
    critic: bool = False
    activation_offload: bool = False
    staging: int = 0
    staging_on_gpu: bool = False


@dataclass(frozen=True)
class ServeFacts:
    """What a run asks of its servers."""

    engine: str
    running: int
    context: int
    prefill: int
    prefix_cache: bool
    kv_gib: float | None = None  # the engine's limit
    share: float = 0.9  # of the GPU that the engine takes, where it decides by share
    slots: int | None = None


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step: sequences, and an assumed mean length in tokens."""

    sequences: int
    length: float
    generated: float
    passes: float = 1.0  # updates on the same tokens


@dataclass(frozen=True)
class Part:
    """One part of the memory of a process, and how it is computed, in words."""

    name: str
    size: float
    formula: str
    where: Literal["gpu", "host"] = "gpu"


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU, and of the host for it, at the moment that needs most."""

    parts: tuple[Part, ...]
    peak: str

    def total(self, where: Literal["gpu", "host"] = "gpu") -> float:
        """Return bytes."""
        return sum(part.size for part in self.parts if part.where == where)
