"""Sizes that memory and speed are computed from: of a model, of a run, of a machine. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

GIB: Final = 2**30
# Of all hosts together, the most that are planned for.
MOST_GPUS: Final = 65_536
# Share of each GPU's memory that stays free, besides a GiB: for CUDA, NCCL, workspaces of kernels
# and fragmentation.
RESERVED_SHARE: Final = 0.06
Place = Literal["gpu", "host"]


@dataclass(frozen=True)
class Machine:
    """``gpus`` GPUs of ``memory`` bytes each, equally many on each of ``hosts``."""

    gpus: int
    memory: float
    hosts: int = 1

    @property
    def available(self) -> float:
        """Bytes of a GPU for tensors."""
        return self.memory * (1 - RESERVED_SHARE) - GIB

    @property
    def per_host(self) -> int:
        return self.gpus // self.hosts

    def hosts_of(self, first: int, number: int) -> int:
        """Return over how many hosts consecutive GPUs are spread."""
        return (first + number - 1) // self.per_host - first // self.per_host + 1


@dataclass(frozen=True)
class ActivationFacts:
    """Traced bytes per token that the model keeps in training, without gradient checkpointing.

    Attributes:
        kept: saved by all blocks together for the backward pass.
        wide: the part of ``kept`` that is as wide as the residual stream, which tensor parallelism
            does not divide.
        outside: saved before the first block and after the last one.
        block: most that one block holds in its own forward and backward pass, without gradients of
            its weights.
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
        embedding: parameters of the input embeddings, which are the output matrix, too, if
            ``tied``.
        outside: other parameters outside of blocks.
        active: parameters that one token is multiplied with; fewer than all in a mixture of
            experts.
        kv_bytes: keys and values of one token in all blocks.
        linears: name, inputs and outputs of each linear layer in the blocks, and of stacked
            experts, all together.
    """

    path: str
    architecture: str
    itemsize: int
    blocks: tuple[int, ...]
    embedding: int
    outside: int
    active: int
    tied: bool
    vocab: int
    heads: int
    kv_heads: int
    kv_bytes: int
    linears: tuple[tuple[str, int, int], ...]
    activations: ActivationFacts

    @property
    def parameters(self) -> int:
        return sum(self.blocks) + self.embedding + self.outside

    def converted(self, itemsize: int) -> ModelFacts:
        """Return the same model with weights, keys and values of another width; 0: unchanged."""
        if itemsize in (0, self.itemsize):
            return self
        ratio = itemsize / self.itemsize
        block = self.activations.block * ratio
        return replace(
            self,
            itemsize=itemsize,
            kv_bytes=round(self.kv_bytes * ratio),
            activations=replace(self.activations, block=block),
        )


@dataclass(frozen=True)
class TrainFacts:
    """What a run asks of its learner.

    Attributes:
        slice_tokens: tokens of the largest forward pass of one rank.
        lora_parameters: of the adapters; 0 if all weights are trained.
        reference: a second, frozen copy of the model.
        staging: bytes of one version of the weights as it is sent.
        staging_on_gpu: whether the sender holds its two buffers there.
        logit_block: bytes of logits that are turned into probabilities at once, as in
            learner.backends.models.token_scores.
    """

    slice_tokens: int
    lora_parameters: int = 0
    reference: bool = False
    critic: bool = False
    activation_offload: bool = False
    staging: int = 0
    staging_on_gpu: bool = False
    logit_block: int = 1 << 26


@dataclass(frozen=True)
class ServeFacts:
    """What a run asks of its servers.

    Attributes:
        running: sequences in one decode batch.
        context: tokens of the longest sequence.
        prefill: tokens of one pass over prompts.
        slots: sequences whose keys and values are kept, if memory suffices.
        kv_gib: limit of the cache that the configuration sets.
        share: of a GPU's memory that the engine takes; 0 if it takes what it needs.
        itemsize: bytes per weight in the engine; 0: as in the model.
    """

    engine: str
    running: int
    context: int
    prefill: int
    slots: int
    kv_gib: float | None = None
    share: float = 0.0
    itemsize: int = 0


@dataclass(frozen=True)
class StepFacts:
    """One optimizer step: sequences, and an assumed mean length in tokens."""

    sequences: int
    length: float
    generated: float
    passes: int = 1  # over the same sequences


@dataclass(frozen=True)
class Part:
    """One part of the memory of a process, and how it is computed, in words."""

    name: str
    size: float
    formula: str
    where: Place = "gpu"


@dataclass(frozen=True)
class Memory:
    """The memory of one GPU, and of the host for it, at the moment that needs most."""

    parts: tuple[Part, ...]
    peak: str

    def total(self, where: Place = "gpu") -> float:
        """Return bytes."""
        return sum(part.size for part in self.parts if part.where == where)
