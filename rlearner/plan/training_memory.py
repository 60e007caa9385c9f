"""Memory of one rank of the learner, part by part, at the moment of a step that needs most. Pure.

Compared with tensor bytes of real steps of the backend ``torch`` by ``bench.plan``; docs/plan.md
says what was not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rlearner.plan.facts import ActivationFacts, Memory, ModelFacts, Part, Place, TrainFacts

# float32 numbers held at once for logits, as in learner.backends.models.policy.
LOGIT_BUDGET: Final = 1 << 28
# In float32: the logit, then its probability, then its gradient in the same memory.
LOGIT_COPIES: Final = 1
# Logit, log-probability, probability, and two for the entropy.
MEGATRON_COPIES: Final = 5
FLOAT: Final = 4
# Default of train.deepspeed.reduce_bucket_size.
BUCKET: Final = 50_000_000
# Default of train.deepspeed.max_live_parameters.
LIVE: Final = 1_000_000_000


@dataclass(frozen=True)
class LearnerLayout:
    """How a learner is divided over its GPUs."""

    backend: str
    ranks: int = 1
    stage: int = 0  # of deepspeed
    tensor: int = 1  # ranks that share a layer
    pipeline: int = 1  # stages
    checkpointing: bool = False
    offload: bool = False  # master weights, gradients and moments in host memory

    @property
    def parts(self) -> int:
        """Ranks that hold one copy of the model together, each a part of it while it computes."""
        return self.tensor * self.pipeline

    @property
    def copies(self) -> int:
        """Slices that are computed at the same time."""
        return self.ranks // self.parts

    @property
    def over(self) -> tuple[int, int, int]:
        """Ranks over which weights, summed gradients and the optimizer are divided."""
        if self.backend == "fsdp2":
            return self.ranks, self.ranks, self.ranks
        if self.backend == "deepspeed":
            weights = self.ranks if self.stage == 3 else 1
            gradients = self.ranks if self.stage >= 2 else 1
            return weights, gradients, self.ranks
        return self.parts, self.parts, self.parts

    @property
    def words(self) -> str:
        """The layout in words."""
        text = self.backend
        if self.stage:
            text += f" stage {self.stage}"
        if self.parts > 1:
            text += f" tensor {self.tensor} x pipeline {self.pipeline} x {self.copies} copies"
        text += f" on {self.ranks} GPU{'s' * (self.ranks > 1)}"
        notes = ["gradient checkpointing"] * self.checkpointing
        notes += ["optimizer in host memory"] * self.offload
        if notes:
            text += f" ({', '.join(notes)})"
        return text


@dataclass(frozen=True)
class _Moment:
    """One moment of a step, and what is held then in addition to what is always held."""

    name: str
    parts: tuple[Part, ...]

    @property
    def size(self) -> float:
        return sum(part.size for part in self.parts if part.where == "gpu")


def learner_memory(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> Memory:
    """Return what one rank holds when it holds most."""
    moments = _step_moments(model, train, layout)
    peak = max(moments, key=lambda moment: moment.size)
    parts = [
        *_state_parts(model, train, layout),
        *_copy_parts(model, train, layout),
        *_gathered_parts(model, layout),
        *peak.parts,
    ]
    # Host memory is counted at its own peak, the first moment.
    parts += [part for part in moments[0].parts if part.where == "host" and part not in peak.parts]
    return Memory(tuple(part for part in parts if part.size), peak.name)


def _state_parts(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> list[Part]:
    """Return weights, masters, moments and summed gradients."""
    weights, gradients, optimizer = layout.over
    trained = train.lora_parameters or model.parameters
    noun = "trained parameters"
    place: Place = "host" if layout.offload else "gpu"
    parts = [
        _shared_part("weights", model.parameters, model.itemsize, ranks=weights, noun="parameters")
    ]
    if train.lora_parameters:
        parts.append(_shared_part("adapters", trained, FLOAT, ranks=weights, noun="factors"))
    is_rounded = model.itemsize != FLOAT and not train.lora_parameters
    if is_rounded or layout.offload or layout.backend == "deepspeed":
        parts.append(
            _shared_part("master weights", trained, FLOAT, ranks=optimizer, noun=noun, place=place)
        )
    parts += [
        _shared_part("moments", trained, 2 * FLOAT, ranks=optimizer, noun=noun, place=place),
        _shared_part("summed gradients", trained, FLOAT, ranks=gradients, noun=noun, place=place),
    ]
    return parts


def _copy_parts(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> list[Part]:
    """Return further models, and the sender's buffers."""
    parts: list[Part] = []
    place: Place
    if train.reference:
        parts.append(
            _shared_part(
                "reference",
                model.parameters,
                model.itemsize,
                ranks=layout.parts,
                noun="frozen parameters",
            )
        )
    # Whole on every rank; its gradients are gone before the policy's pass, which needs more.
    if train.critic:
        place = "host" if layout.offload else "gpu"
        optimizer_bytes = 2 * FLOAT  # moments
        if model.itemsize != FLOAT or layout.offload:
            optimizer_bytes += FLOAT  # master weights
        critic = _shared_part(
            "critic", model.parameters, model.itemsize, ranks=1, noun="parameters"
        )
        optimizer = _shared_part(
            "critic's optimizer",
            model.parameters,
            optimizer_bytes,
            ranks=1,
            noun="parameters",
            place=place,
        )
        parts += [critic, optimizer]
    if train.staging:
        place = "gpu" if train.staging_on_gpu else "host"
        text = f"2 buffers x {train.staging:,} bytes of weights as they are sent, rank 0 only"
        parts.append(Part("weight staging", 2 * train.staging, text, place))
    return parts


def _gathered_parts(model: ModelFacts, layout: LearnerLayout) -> list[Part]:
    """Return the whole weights and gradient buffers that a sharded rank needs to compute."""
    item = model.itemsize
    root = model.embedding + model.outside
    if layout.backend == "fsdp2" and layout.ranks > 1:
        size = item * (2 * max(model.blocks) + root) + FLOAT * max(model.blocks)
        return [
            Part(
                "gathered weights",
                size,
                "2 blocks, embeddings, output layer; a block's gradient in float32",
            )
        ]
    if layout.backend != "deepspeed":
        return []
    buckets = Part(
        "reduce buckets", 2 * FLOAT * BUCKET, "2 x train.deepspeed.reduce_bucket_size x 4 bytes"
    )
    if layout.stage < 3 or layout.ranks == 1:
        return [buckets]
    live = min(model.parameters, LIVE)
    text = f"{live:,} parameters x {item} bytes: at most train.deepspeed.max_live_parameters"
    return [buckets, Part("gathered weights", item * live, text)]


def _step_moments(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> list[_Moment]:
    """Return the moments of which one needs most; at the first of them all activations exist."""
    tokens = train.slice_tokens
    acts = model.activations
    place: Place = "host" if train.activation_offload else "gpu"
    # A stage of p keeps p slices of its 1/p of the blocks: as much as one slice of all of them.
    saved = _saved_bytes(acts, layout)
    content = "what blocks save for the backward pass"
    if layout.checkpointing:
        saved = acts.stream * len(model.blocks)
        content = "block inputs"
    # The output layer reads the trained positions of the last stream.
    ends = acts.outside + acts.stream
    text = f"{tokens:,} tokens x {saved + ends:,.0f} bytes: {content} (traced)"
    all_blocks = Part("activations", tokens * (saved + ends), text, place)
    all_but_one = Part("activations", tokens * saved * (1 - 1 / len(model.blocks)), text, place)
    block = acts.block * _saved_bytes(acts, layout) / max(acts.kept, 1.0)
    # The gradient that enters the block, and its sum with that of the residual stream.
    block += 2 * acts.stream
    working = Part(
        "one block", tokens * block, f"{tokens:,} tokens x {block:,.0f} bytes: its passes (traced)"
    )
    head, whole, sums = _gradient_parts(model, train, layout)
    logits = _logits_part(model, train, layout)
    repeated = (head,) if tokens * model.vocab * _logit_copies(layout) > LOGIT_BUDGET else ()
    output = Part("new gradients", _output_gradient(model, train, layout), "of the output layer")
    return [
        _Moment("logits", (all_blocks, logits, _logprobs_part(model, train, layout), *repeated)),
        _Moment("backward pass of the output layer", (all_blocks, logits, output)),
        _Moment("backward pass of the last block", (all_but_one, working, head)),
        _Moment("backward pass of the first block", (working, whole)),
        _Moment("end of the backward pass", (whole, sums)),
    ]


def _saved_bytes(acts: ActivationFacts, layout: LearnerLayout) -> float:
    """Return the bytes per token that blocks save on one rank; the wide ones are not divided."""
    return acts.wide + (acts.kept - acts.wide) / layout.tensor


def _logits_part(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> Part:
    copies = _logit_copies(layout)
    rows = min(train.slice_tokens, max(1, LOGIT_BUDGET // (copies * model.vocab)))
    logit_bytes = FLOAT * copies
    if model.itemsize != FLOAT:
        logit_bytes += model.itemsize  # the model's own output, before it is converted
    text = (
        f"{rows:,} tokens at once x {model.vocab:,} logits x {logit_bytes} bytes"
        f"{_divided_text(layout.tensor)}"
    )
    return Part("logits", rows * model.vocab * logit_bytes / layout.tensor, text)


def _logit_copies(layout: LearnerLayout) -> int:
    return MEGATRON_COPIES if layout.backend == "megatron" else LOGIT_COPIES


def _logprobs_part(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> Part:
    size = 0
    if layout.backend != "megatron":
        size = min(train.logit_block, FLOAT * train.slice_tokens * model.vocab)
    return Part("log-probabilities", size, "of one block of logits")


def _output_gradient(model: ModelFacts, train: TrainFacts, layout: LearnerLayout) -> float:
    if train.lora_parameters:
        return 0
    return model.itemsize * model.embedding / layout.tensor


def _gradient_parts(
    model: ModelFacts, train: TrainFacts, layout: LearnerLayout
) -> tuple[Part, Part, Part]:
    """Return gradients outside the float32 sums: of the output layer, all, of the embeddings."""
    item = model.itemsize
    name = "new gradients"
    no_part = Part(name, 0, "")
    if train.lora_parameters:
        return no_part, no_part, no_part
    # The gradient of a tied matrix is complete only after the embeddings' own.
    tied = model.embedding * model.tied
    matrix = _output_gradient(model, train, layout)
    sums = Part(
        "embeddings",
        3 * matrix if tied else matrix,
        "gradients of output layer and embeddings, and their sum",
    )
    if layout.backend == "deepspeed":  # reduced bucket by bucket
        bucket = Part(name, min(item * model.parameters, FLOAT * BUCKET), "of one reduce bucket")
        return no_part, bucket, sums
    if layout.backend == "fsdp2" and layout.ranks > 1:
        root = model.embedding + model.outside
        blocks = sum(model.blocks)
        text = (
            f"{blocks:,} parameters x {item} bytes{_divided_text(layout.ranks)}, "
            f"and {root:,} x {item + FLOAT} bytes"
        )
        whole = Part(name, item * blocks / layout.ranks + (item + FLOAT) * root, text)
        return Part(name, matrix, "of the output layer"), whole, sums
    if item == FLOAT and not layout.offload:  # added to the sums at once
        return no_part, no_part, sums
    untied = model.parameters - tied
    text = f"{untied:,} parameters x {item} bytes{_divided_text(layout.parts)}"
    whole = Part(name, item * untied / layout.parts, text)
    return Part(name, matrix, "of the output layer"), whole, sums


def _shared_part(
    name: str, number: int, itemsize: int, *, ranks: int, noun: str, place: Place = "gpu"
) -> Part:
    """Return a part that is divided over ``ranks``."""
    text = f"{number:,} {noun} x {itemsize} bytes{_divided_text(ranks)}"
    return Part(name, number * itemsize / ranks, text, place)


def _divided_text(ranks: int) -> str:
    return f" / {ranks} ranks" if ranks > 1 else ""
