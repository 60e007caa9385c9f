"""Memory of one rank of the learner, part by part, at the moment of a step that needs most. Pure.

Tested against tensor bytes of real steps of ``learner.backends.torch``; see docs/plan.md for what was never measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlearner.plan.facts import Memory, ModelFacts, Part, TrainFacts

LOGIT_BUDGET: Final = 1 << 26  # logits held at once, as learner.backends.models.policy
LOGIT_BYTES: Final = 20  # of one logit in float32: it, log-probability, probability, and two of the entropy
CRITIC_BYTES: Final = 16  # float32 weight, gradient and two moments
REDUCE_BUCKET: Final = 50_000_000  # train.deepspeed.reduce_bucket_size


@dataclass(frozen=True)
class LearnerLayout:
    """How a learner is divided over its GPUs."""

    backend: str
    ranks: int = 1
    stage: int = 0  # of deepspeed
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    checkpointing: bool = False
    offload: bool = False  # master weights and moments in host memory

    @property
    def copies(self) -> int:
        """Ranks that work on different slices."""
        return self.ranks // (self.tensor_parallel * self.pipeline_parallel)


@dataclass(frozen=True)
class _Shares:
    """The share of each kind of tensor that one rank holds."""

    weights: float
    optimizer: float
    gradients: float


def learner_memory(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> Memory:
    """Return what one rank holds at its peak."""
    return Memory((*_held(model, train, layout), *_peak(model, train, layout)[1]), _peak(model, train, layout)[0])


def _shares(layout: LearnerLayout) -> _Shares:
    ranks, model_parallel = layout.ranks, layout.tensor_parallel * layout.pipeline_parallel
    match layout.backend:
        case "fsdp2":
            return _Shares(1 / ranks, 1 / ranks, 1 / ranks)
        case "deepspeed":
            return _Shares(
                1 / ranks if layout.stage == 3 else 1, 1 / ranks, 1 / ranks if layout.stage >= 2 else 1
            )
        case _:
            return _Shares(*[1 / model_parallel] * 3)


def _held(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> list[Part]:
    """Return what stays during a step: weights, master weights, moments, summed gradients, reference, critic."""
    shares, total, item = _shares(layout), model.parameters, model.itemsize
    trained = train.lora_parameters or total
    rounded = layout.backend == "deepspeed" or (item != 4 and not train.lora_parameters)
    place = "host" if layout.offload else "gpu"
    over = _divisor(shares.weights)
    parts = [Part("weights", item * total * shares.weights, f"{total:,} parameters x {item} bytes{over}")]
    if train.lora_parameters:
        parts.append(Part("adapters", 4 * trained * shares.weights, f"{trained:,} factors x 4 bytes{over}"))
    over = _divisor(shares.optimizer)
    if rounded or layout.offload:
        text = f"{trained:,} trained parameters x 4 bytes (float32){over}"
        parts.append(Part("master weights", 4 * trained * shares.optimizer, text, place))
    text = f"{trained:,} trained parameters x 2 moments x 4 bytes{over}"
    parts.append(Part("moments", 8 * trained * shares.optimizer, text, place))
    text = f"{trained:,} trained parameters x 4 bytes (summed in float32){_divisor(shares.gradients)}"
    parts.append(Part("gradients", 4 * trained * shares.gradients, text, place))
    if train.reference:
        share = 1 / (layout.tensor_parallel * layout.pipeline_parallel)
        parts.append(Part("reference", item * total * share, f"{total:,} parameters x {item} bytes{_divisor(share)}"))
    if train.critic:
        text = f"{total:,} parameters x {CRITIC_BYTES} bytes, whole on every rank"
        parts.append(Part("critic", CRITIC_BYTES * total, text))
    if train.staging:
        where = "gpu" if train.staging_on_gpu else "host"
        text = "2 buffers of the weights as they are sent, on the first rank"
        parts.append(Part("weight staging", 2 * train.staging, text, where))
    return parts


def _peak(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> tuple[str, list[Part]]:
    """Return the moment with the largest sum of activations, logits, live gradients and working memory."""
    item, tokens, acts = model.itemsize, train.slice_tokens, model.activations
    tensor, stages = layout.tensor_parallel, layout.pipeline_parallel
    blocks = len(model.blocks)
    kept = acts.wide + (acts.kept - acts.wide) / tensor + train.lora_bytes / tensor  # each stage: a part, pp slices
    inputs = acts.stream * blocks
    block = acts.block if tensor == 1 else acts.block * max(1 / tensor, acts.wide / max(acts.kept, 1.0))
    outside = (acts.outside + acts.stream) / 1.0  # and the trained positions that the output layer reads
    saved = inputs if layout.checkpointing else kept
    where, offloaded = ("host", True) if train.activation_offload else ("gpu", False)
    note = "block inputs" if layout.checkpointing else "what the blocks save"
    text = f"{tokens:,} tokens x {_number(saved + outside)} bytes: {note}, traced"
    activations = Part("activations", tokens * (saved + outside), text, where)  # type: ignore[arg-type]
    rows = min(tokens, max(1, LOGIT_BUDGET // model.vocab))
    per_logit = LOGIT_BYTES + (item if item != 4 else 0)
    text = f"{rows:,} tokens at once x {model.vocab:,} logits x {per_logit} bytes{_divisor(1 / tensor)}"
    logits = Part("logits", rows * model.vocab * per_logit / tensor, text)
    gathered = _gathered(model, layout)
    live, head_live, transient = _live_gradients(model, train, layout)
    head = [Part("live gradients", head_live, "of the output layer")] if rows < tokens and head_live else []
    first = tokens * (acts.stream if offloaded or layout.checkpointing else kept / blocks)
    working = tokens * block
    in_block = Part("working", working, f"{tokens:,} tokens x {_number(block)} bytes: one block's passes, traced")
    last = Part("activations", 0.0 if offloaded else max(0.0, activations.size - tokens * outside - first), text, where)  # type: ignore[arg-type]
    text = f"of all weights of this rank in {_dtype(item)}"
    everything = Part("live gradients", live, text)
    embedding = Part("working", transient, "gradients of the embeddings: output layer, input, and their sum")
    moments: dict[str, list[Part]] = {
        "the logits": [activations, logits, *head],
        "the last block's backward pass": [last, in_block, Part("live gradients", head_live, "of the output layer")],
        "the first block's backward pass": [in_block, Part("live gradients", max(0.0, live - head_live), text)],
        "the end of the backward pass": [everything, embedding],
    }
    host = [activations] if offloaded else []
    name = max(moments, key=lambda name: sum(part.size for part in moments[name] if part.where == "gpu"))
    chosen = [part for part in moments[name] if part.size and part.where == "gpu"]
    return name, [*chosen, *host, *gathered]


def _live_gradients(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> tuple[float, float, float]:
    """Return the bytes of gradients before they are added to the float32 sums: all, the output layer's, temporary."""
    item, head = model.itemsize, model.embedding
    if train.lora_parameters:
        return 0.0, 0.0, 0.0
    share = 1 / (layout.tensor_parallel * layout.pipeline_parallel)
    temporary = (3.0 if model.tied else 1.0) * item * model.embedding / layout.tensor_parallel
    separate = item != 4 or layout.offload  # float32 weights are their own masters
    if layout.backend == "deepspeed":  # reduced bucket by bucket
        return min(4.0 * REDUCE_BUCKET, item * model.parameters), 0.0, temporary
    if layout.backend == "fsdp2":  # the root's weights are reduced whole, in float32
        root = model.embedding + model.outside
        return item * sum(model.blocks) / layout.ranks + (item + 4) * root, float(item * head), temporary
    return (item * (model.parameters * share - (model.embedding if model.tied else 0)), item * head * share, temporary) if separate else (0.0, 0.0, temporary)


def _gathered(model: ModelFacts, layout: LearnerLayout) -> list[Part]:
    """Return whole weights that a rank gathers while it computes."""
    largest, root = max(model.blocks), model.embedding + model.outside
    if layout.backend == "fsdp2" and layout.ranks > 1:
        size = model.itemsize * (2 * largest + root) + 4 * largest
        return [Part("gathered weights", size, "2 blocks, embeddings and output layer, and a block's gradient")]
    if layout.backend == "deepspeed" and layout.stage == 3 and layout.ranks > 1:
        size = model.itemsize * min(model.parameters, 1_000_000_000) + 4 * 2 * REDUCE_BUCKET
        return [Part("gathered weights", size, "up to train.deepspeed.max_live_parameters, and 2 reduce buckets")]
    if layout.backend == "deepspeed":
        return [Part("reduce buckets", 4 * 2 * REDUCE_BUCKET, "2 x train.deepspeed.reduce_bucket_size x 4 bytes")]
    return []


def _divisor(share: float) -> str:
    return "" if share >= 1 else f" / {round(1 / share)} ranks"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _dtype(item: int) -> str:
    return {2: "16 bits", 4: "float32"}.get(item, f"{item} bytes")
