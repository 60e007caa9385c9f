"""Hugging Face's tensors as parts of Megatron's: which rank holds which rows of which tensor. No communication, no Megatron.

Megatron keeps the queries, keys and values of a layer in one matrix, group by group: the query heads of a group, its key head, its
value head, then the next group. Gate and up projections lie one above the other. Divided over tensor-parallel ranks, each has whole
groups, and its own part of the gate above its own part of the up projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.backends.megatron.architecture import Architecture


@dataclass(frozen=True)
class Part:
    """One Hugging Face tensor in one stage.

    Attributes:
        name: Hugging Face's.
        holder: Megatron's parameter, by its name in the stage's model.
        dim: along which the ranks of a layer share it; None: each has it whole.
        view: of a rank's holder, or anything of its shape, to this rank's share of the tensor; the same memory, perhaps of another shape.
        copy: it is held elsewhere, too, and counts there.
        summed: the ranks of a layer each see but a part of its gradient.
    """

    name: str
    holder: str
    stage: int
    dim: int | None
    view: Callable[[Tensor], Tensor]
    copy: bool = False
    summed: bool = False


def share_size(length: int, tp: int) -> int:
    """Rows of each rank; of a vocabulary that does not divide the last ranks have rows that stand for nothing."""
    return -(-length // tp)


def take_share(whole: Tensor, dim: int | None, tp: int, share: int) -> Tensor:
    """A rank's part of a whole tensor, filled up with zeros where that ends."""
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


def parts_of(shape: Architecture, tp: int, pp: int) -> list[Part]:
    """All of them, in the order of Hugging Face's models; of a tied embedding at both ends of a pipeline the first one counts."""
    found = [Part("model.embed_tokens.weight", "embedding.word_embeddings.weight", 0, 0, as_it_is)]
    per_stage = shape.num_layers // pp
    for layer in range(shape.num_layers):
        found += _layer(shape, tp, layer, layer // per_stage, layer % per_stage)
    found.append(Part("model.norm.weight", "decoder.final_layernorm.weight", pp - 1, None, as_it_is))
    if not shape.tied:
        found.append(Part("lm_head.weight", "output_layer.weight", pp - 1, 0, as_it_is))
    elif pp > 1:
        found.append(Part("model.embed_tokens.weight", "output_layer.weight", pp - 1, 0, as_it_is, copy=True))
    return found


def _layer(shape: Architecture, tp: int, layer: int, stage: int, place: int) -> Iterator[Part]:
    theirs, ours = f"model.layers.{layer}.", f"decoder.layers.{place}."
    for kind in ("weight", "bias") if shape.qkv_bias else ("weight",):
        for name in ("q", "k", "v"):
            view = _heads(shape, tp, name)
            yield Part(f"{theirs}self_attn.{name}_proj.{kind}", f"{ours}self_attention.linear_qkv.{kind}", stage, 0, view)
    yield Part(f"{theirs}self_attn.o_proj.weight", f"{ours}self_attention.linear_proj.weight", stage, 1, as_it_is)
    if shape.qk_norm:
        for name in ("q", "k"):
            holder = f"{ours}self_attention.{name}_layernorm.weight"
            yield Part(f"{theirs}self_attn.{name}_norm.weight", holder, stage, None, as_it_is, summed=True)
    for index, name in enumerate(("gate", "up")):
        yield Part(f"{theirs}mlp.{name}_proj.weight", f"{ours}mlp.linear_fc1.weight", stage, 0, _half(index))
    yield Part(f"{theirs}mlp.down_proj.weight", f"{ours}mlp.linear_fc2.weight", stage, 1, as_it_is)
    yield Part(f"{theirs}input_layernorm.weight", f"{ours}input_layernorm.weight", stage, None, as_it_is)
    yield Part(f"{theirs}post_attention_layernorm.weight", f"{ours}pre_mlp_layernorm.weight", stage, None, as_it_is)


def as_it_is(tensor: Tensor) -> Tensor:
    """The whole holder."""
    return tensor


def _heads(shape: Architecture, tp: int, name: str) -> Callable[[Tensor], Tensor]:
    groups, queries = shape.num_groups // tp, shape.num_heads // shape.num_groups
    places: dict[str, slice | int] = {"q": slice(0, queries), "k": queries, "v": queries + 1}
    wanted = places[name]

    def view(tensor: Tensor) -> Tensor:
        return tensor.view(groups, queries + 2, shape.head_dim, *tensor.shape[1:])[:, wanted]

    return view


def _half(index: int) -> Callable[[Tensor], Tensor]:
    def view(tensor: Tensor) -> Tensor:
        return tensor.view(2, -1, *tensor.shape[1:])[index]

    return view
