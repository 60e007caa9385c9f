"""Maps Hugging Face's tensors to parts of Megatron's; pure functions.

Megatron keeps the queries, keys and values of a layer in one matrix, group by group: query heads,
key head, value head. Gate and up projections are stacked. A tensor-parallel rank has whole groups,
and its part of the gate above its part of the up projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.backends.megatron.architecture import DecoderArchitecture


@dataclass(frozen=True)
class TensorPart:
    """One Hugging Face tensor in one stage.

    Attributes:
        view: returns this rank's share of the tensor, in the memory of a holder or of a tensor of
            its shape.
    """

    name: str  # Hugging Face's name
    holder: str  # name of Megatron's parameter in the stage's model
    stage: int
    dim: int | None  # dimension that the ranks of a layer divide; None if each has it whole
    view: Callable[[Tensor], Tensor]
    copy: bool = False  # whether it duplicates a part of another stage, which counts
    summed: bool = False  # whether each rank of a layer has only a part of its gradient


def share_size(length: int, tp: int) -> int:
    """Return the rows of each rank; if they do not divide, the last ranks have padding."""
    return -(-length // tp)


def take_share(whole: Tensor, dim: int | None, tp: int, share: int) -> Tensor:
    """Return a rank's part of a whole tensor, padded with zeros at the tensor's end."""
    if dim is None or tp == 1:
        return whole
    size = share_size(whole.shape[dim], tp)
    start = min(share * size, whole.shape[dim])
    piece = whole.narrow(dim, start, min(size, whole.shape[dim] - start))
    if piece.shape[dim] == size:
        return piece
    missing = list(whole.shape)
    missing[dim] = size - piece.shape[dim]
    return torch.cat([piece, piece.new_zeros(missing)], dim)


def parts_of(shape: DecoderArchitecture, tp: int, pp: int) -> list[TensorPart]:
    """Return all parts, in the order of Hugging Face's models.

    An embedding that is tied across stages counts in the first.
    """
    parts = [
        TensorPart(
            "model.embed_tokens.weight", "embedding.word_embeddings.weight", 0, 0, whole_view
        )
    ]
    per_stage = shape.num_layers // pp
    for layer in range(shape.num_layers):
        parts += _layer_parts(shape, tp, layer, layer // per_stage, layer % per_stage)
    parts.append(
        TensorPart("model.norm.weight", "decoder.final_layernorm.weight", pp - 1, None, whole_view)
    )
    if not shape.tied:
        parts.append(TensorPart("lm_head.weight", "output_layer.weight", pp - 1, 0, whole_view))
    elif pp > 1:
        parts.append(
            TensorPart(
                "model.embed_tokens.weight", "output_layer.weight", pp - 1, 0, whole_view, copy=True
            )
        )
    return parts


def _layer_parts(
    shape: DecoderArchitecture, tp: int, layer: int, stage: int, place: int
) -> Iterator[TensorPart]:
    theirs = f"model.layers.{layer}."
    ours = f"decoder.layers.{place}."
    attention = f"{ours}self_attention."
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        for name in ("q", "k", "v"):
            view = _head_view(shape, tp, name)
            yield TensorPart(
                f"{theirs}self_attn.{name}_proj.{kind}",
                f"{attention}linear_qkv.{kind}",
                stage,
                0,
                view,
            )
    yield TensorPart(
        f"{theirs}self_attn.o_proj.weight", f"{attention}linear_proj.weight", stage, 1, whole_view
    )
    if shape.qk_norm:
        for name in ("q", "k"):
            holder = f"{attention}{name}_layernorm.weight"
            yield TensorPart(
                f"{theirs}self_attn.{name}_norm.weight",
                holder,
                stage,
                None,
                whole_view,
                summed=True,
            )
    for index, name in enumerate(("gate", "up")):
        yield TensorPart(
            f"{theirs}mlp.{name}_proj.weight",
            f"{ours}mlp.linear_fc1.weight",
            stage,
            0,
            _half_view(index),
        )
    yield TensorPart(
        f"{theirs}mlp.down_proj.weight", f"{ours}mlp.linear_fc2.weight", stage, 1, whole_view
    )
    for norm, holder in (
        ("input_layernorm", "input_layernorm"),
        ("post_attention_layernorm", "pre_mlp_layernorm"),
    ):
        yield TensorPart(
            f"{theirs}{norm}.weight", f"{ours}{holder}.weight", stage, None, whole_view
        )


def whole_view(tensor: Tensor) -> Tensor:
    """Return the whole holder."""
    return tensor


def _head_view(shape: DecoderArchitecture, tp: int, name: str) -> Callable[[Tensor], Tensor]:
    groups = shape.num_groups // tp
    queries = shape.num_heads // shape.num_groups
    places: dict[str, slice | int] = {"q": slice(0, queries), "k": queries, "v": queries + 1}
    index = places[name]

    def view(tensor: Tensor) -> Tensor:
        return tensor.view(groups, queries + 2, shape.head_dim, *tensor.shape[1:])[:, index]

    return view


def _half_view(index: int) -> Callable[[Tensor], Tensor]:
    def view(tensor: Tensor) -> Tensor:
        return tensor.view(2, -1, *tensor.shape[1:])[index]

    return view
