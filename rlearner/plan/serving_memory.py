"""Memory of one GPU of a rollout server, and the slots that fit. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlearner.plan.facts import GIB, Machine, Memory, ModelFacts, Part, ServeFacts

# Of one sampled row in float32: logits, probabilities, sorted values and their order.
LOGIT_BYTES: Final = 16


@dataclass(frozen=True)
class ServerLayout:
    """One server: ``tensor`` GPUs share one copy of the model."""

    tensor: int = 1


@dataclass(frozen=True)
class ServerMemory:
    """The memory of each of a server's GPUs; ``slots`` full sequences have room in its cache."""

    memory: Memory
    slots: int
    running: int


def server_memory(
    model: ModelFacts, serve: ServeFacts, layout: ServerLayout, machine: Machine
) -> ServerMemory:
    """Return what a server holds; without a slot if the memory does not suffice for one."""
    model = model.converted(serve.itemsize)
    tensor = layout.tensor
    over = f" / {tensor} GPUs" if tensor > 1 else ""
    text = f"{model.parameters:,} parameters x {model.itemsize} bytes{over}"
    weights = Part("weights", model.parameters * model.itemsize / tensor, text)
    token_bytes = model.activations.block / tensor
    text = (
        f"{serve.prefill:,} tokens of rollout.prefill_tokens x {token_bytes:,.0f} bytes: "
        "one block (traced), at most"
    )
    working = Part("one block", serve.prefill * token_bytes, text)
    text = (
        f"{serve.running:,} rows of rollout.max_running x {model.vocab:,} logits "
        f"x {LOGIT_BYTES} bytes"
    )
    logits = Part("logits", serve.running * model.vocab * LOGIT_BYTES, text)
    slot = slot_bytes(model, serve.context, tensor)
    limit = machine.available
    if serve.share:
        limit = min(limit, serve.share * machine.memory)
    room = limit - weights.size - working.size - logits.size
    if serve.kv_gib is not None:
        room = min(room, serve.kv_gib * GIB)
    slots = max(0, min(serve.slots, int(room // slot)))
    per_token = slot // serve.context
    text = (
        f"{slots:,} slots x {serve.context:,} tokens of rollout.max_context_tokens "
        f"x {per_token:,.0f} bytes"
    )
    cache = Part("KV cache", slots * slot, text)
    return ServerMemory(
        Memory((weights, cache, logits, working), "reading prompts"),
        slots,
        min(serve.running, slots),
    )


def slot_bytes(model: ModelFacts, context: int, tensor: int = 1) -> int:
    """Return the keys and values of one sequence on one GPU; heads fewer than GPUs are copied."""
    return context * model.kv_bytes // min(tensor, model.kv_heads)
