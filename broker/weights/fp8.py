"""FP8 on the weight channel: the sender quantizes matrices of linear layers, the receiver
dequantizes them.

A matrix ``X`` travels as ``X`` (float8_e4m3fn) and ``X_scale_inv`` (float32), one scale per block
of 128 x 128 elements, smaller at the right and lower edges: weight = q * scale. This is the layout
of DeepSeek-V3's checkpoints (DeepSeek-AI, 2024, arXiv 2412.19437, section 3.3) and of Qwen's FP8
checkpoints.

A scale is the smallest power of two by which the block's largest element, rounded to four
significant bits, is at most 448 (like the UE8M0 scales of OCP's Microscaling specification).
Multiplying and dividing are thus exact, which gives three properties that largest / 448 lacks: an
element is off by at most 1/16 of itself, or 2^-10 scales if that is more; quantizing a dequantized
matrix gives the same bits; and a block whose largest element moves a little keeps its scale, so few
bytes change between versions.

A block with an element that is not finite, or above 448 * 2^119 (3e38), gets the scale NaN: a
server that loads it computes NaN, which the probe finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from broker.weights.memory.on_demand import OnDemand
from broker.weights.plan import ITEM_BYTES, TensorSpec
from broker.weights.rounding import cast

NAME: Final = "fp8"  # the value of ``train.weights_dtype``
BLOCK: Final = 128
SCALE: Final = "_scale_inv"  # suffix of a matrix's name
FLOAT8: Final = torch.float8_e4m3fn
PIECE_ELEMENTS: Final = 1 << 19  # per thread: shorter pieces would cost more than the cache saves
GPU_PIECE_ELEMENTS: Final = 1 << 24
_WIDE: Final = ("float64", "float32", "bfloat16", "float16")
# in any part of the name: not a linear layer, or too sensitive
_ALL_LESS: Final = ("embed", "norm", "router")
_LAST_LESS: Final = ("gate", "head", "lm_head")
_LARGEST: Final = 448.0 * 2.0**119  # of an element: 256 * scale must be finite
_FRACTION: Final = 0x7FFFFF  # bits of a float32
# 1.8125, the largest fraction that four significant bits round down to 1.75
_ROUNDS_TO_448: Final = 0x680000


def is_linear(name: str, shape: Sequence[int]) -> bool:
    """Decide whether a tensor is quantized: the weight of a linear layer in a numbered block, or of
    stacked experts.

    Embeddings, output heads, norms, routers, gates of a shared expert and biases are not. Name and
    shape alone decide, so both ends agree.
    """
    layer, _, last = name.rpartition(".")
    parts = layer.split(".")
    if not any(part.isdigit() for part in parts) or any(
        word in part for part in parts for word in _ALL_LESS
    ):
        return False
    if parts[-1] in _LAST_LESS or parts[-1].endswith("_gate") or 0 in shape:
        return False
    return (
        len(shape) == 2 and last == "weight"
        if len(shape) != 3
        else parts[-1] == "experts" and "bias" not in last
    )


def specs_of(own: TensorSpec) -> list[TensorSpec]:
    """Return how a tensor of a model travels: matrices that are not quantized in 16 bits, all else
    unchanged.
    """
    if own.dtype not in _WIDE or len(own.shape) < 2 or own.name.endswith(SCALE):
        return [own]
    if is_linear(own.name, own.shape):
        return [
            replace(own, dtype="float8_e4m3fn"),
            TensorSpec(own.name + SCALE, scale_shape(own.shape), "float32"),
        ]
    return [replace(own, dtype="bfloat16") if ITEM_BYTES[own.dtype] > 2 else own]


def scale_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix or of stacked matrices."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


def quantise(
    weight: Tensor, into: Tensor, scales: Tensor, most: int = GPU_PIECE_ELEMENTS
) -> Iterator[int]:
    """Quantize piece by piece on the weight's device; yield how many elements of ``into`` are
    complete, in its order.

    Args:
        weight: (rows, columns) or (n, rows, columns), floating point.
        into: float8_e4m3fn of that shape, on any device.
        scales: float32, of shape ``scale_shape``, on the device of ``into``.
        most: elements at a time, or one row of blocks if that is more.
    """
    rows, columns = weight.shape[-2:]
    room = _Room(weight.device)
    stacks = (
        tensor.unsqueeze(0) if tensor.ndim == 2 else tensor for tensor in (weight, into, scales)
    )
    for index, (source, target, factors) in enumerate(zip(*stacks, strict=True)):
        for part, blocks in _pieces(rows, columns, source.is_cuda, most):
            _quantise_piece(source[part], target[part], factors[blocks], room)
            if (right := part[1].stop) >= columns:
                yield index * rows * columns + min(part[0].stop, rows) * right


def dequantise(weight: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weights, q * scale in float32, then cast; on the device of ``weight``."""
    weights = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    room = _Room(weight.device)
    stacks = (
        tensor.unsqueeze(0) if tensor.ndim == 2 else tensor for tensor in (weight, scales, weights)
    )
    for source, factors, target in zip(*stacks, strict=True):
        for part, blocks in _pieces(
            weight.shape[-2], weight.shape[-1], weight.is_cuda, GPU_PIECE_ELEMENTS
        ):
            _dequantise_piece(source[part], factors[blocks], target[part], room)
    return weights


def as_sent(name: str, weight: Tensor) -> Tensor:
    """Return what a server computes with instead of this tensor, in its dtype; the tensor itself if
    it is unchanged.
    """
    specs = specs_of(
        TensorSpec(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."))
    )
    if len(specs) == 1:
        return cast(weight, getattr(torch, specs[0].dtype)).to(weight.dtype)
    quantized = torch.empty(weight.shape, dtype=FLOAT8, device=weight.device)
    scales = torch.empty(scale_shape(weight.shape), dtype=torch.float32, device=weight.device)
    for _ in quantise(weight, quantized, scales):
        pass
    return dequantise(quantized, scales, weight.dtype)


class DequantizedModel(OnDemand):
    """A model as an engine takes it, made of tensors as they travelled.

    Args:
        sent: tensors by the names of the plan.
        dtypes: the engine's, by name; matrices are dequantized, all else is passed on.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self._scales = {
            name: tensors[name + SCALE]
            for name, tensor in tensors.items()
            # otherwise the model's own
            if tensor.dtype == FLOAT8 and name + SCALE in tensors and dtypes[name] != FLOAT8
        }
        scales = {name + SCALE for name in self._scales}
        self.base = {name: tensor for name, tensor in tensors.items() if name not in scales}
        self._dtypes = dtypes

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.base[name]
        return (
            tensor
            if name not in self._scales
            else dequantise(tensor, self._scales[name], self._dtypes[name])
        )

    def made(self) -> dict[str, Tensor]:
        """Return all tensors in memory of their own, so that the next version can arrive in the
        same buffer.
        """
        return {
            name: self[name] if name in self._scales else tensor.clone()
            for name, tensor in self.base.items()
        }


def _pieces(
    rows: int, columns: int, gpu: bool, most: int
) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Yield parts of a matrix, left to right and downwards, and their blocks: rows of blocks, or
    the lower edge.
    """
    # torch parallelizes it
    most = max(
        BLOCK * BLOCK,
        min(most, GPU_PIECE_ELEMENTS if gpu else PIECE_ELEMENTS * torch.get_num_threads()),
    )
    high = max(1, most // (BLOCK * columns)) * BLOCK
    wide = columns if BLOCK * columns <= most else most // (BLOCK * BLOCK) * BLOCK
    full = rows // BLOCK * BLOCK
    tops = [*range(0, full, high), *([full] if full < rows else [])]
    for top in tops:
        bottom = min(top + high, full) if top < full else rows
        for first_column in range(0, columns, wide):
            right = min(first_column + wide, columns)
            blocks = (
                slice(top // BLOCK, -(-bottom // BLOCK)),
                slice(first_column // BLOCK, -(-right // BLOCK)),
            )
            yield (slice(top, bottom), slice(first_column, right)), blocks


class _Room:
    """Scratch memory reused for each piece; fresh pages would cost more than the arithmetic."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[torch.dtype, int], Tensor] = {}

    def of(self, dtype: torch.dtype, like: Tensor, number: int = 0) -> Tensor:
        """Return a tensor of this dtype in the shape of another; the first piece is the largest."""
        if (dtype, number) not in self._held:
            self._held[dtype, number] = torch.empty(like.numel(), dtype=dtype, device=self._device)
        return self._held[dtype, number][: like.numel()].view(like.shape)


def _quantise_piece(source: Tensor, target: Tensor, scales: Tensor, room: _Room) -> None:
    rows, columns = source.shape
    across = scales.shape[1]
    blocks = (
        source if source.dtype == torch.float32 else room.of(torch.float32, source, 1).copy_(source)
    )
    blocks = blocks.view(-1, min(rows, BLOCK), columns)  # (blocks down, rows of one, columns)
    scaled = room.of(torch.float32, blocks)
    largest = torch.abs(blocks, out=scaled).amax(1)
    largest = (
        torch.nn.functional.pad(largest, (0, across * BLOCK - columns))
        .view(-1, across, BLOCK)
        .amax(2)
    )
    power = (((largest.view(torch.int32) + (_FRACTION - _ROUNDS_TO_448)) >> 23) - 135).clamp_(
        -126, 119
    )
    factors = _power_of_two(power).masked_fill_(~(largest <= _LARGEST), torch.nan)
    inverse = _power_of_two(-power).repeat_interleave(BLOCK, 1)[:, None, :columns]
    scaled = torch.mul(blocks, inverse, out=scaled).view(rows, columns)
    target.copy_(scaled if target.device == scaled.device else scaled.to(FLOAT8), non_blocking=True)
    scales.copy_(factors, non_blocking=True)


def _power_of_two(power: Tensor) -> Tensor:
    """2^power in float32, exactly; -126 to 127."""
    return ((power + 127) << 23).view(torch.float32)


def _dequantise_piece(source: Tensor, scales: Tensor, target: Tensor, room: _Room) -> None:
    rows, columns = source.shape
    values = room.of(torch.float32, source)
    # torch's own cast takes ten times as long: the bits are moved to where a float16 of 1/256 has
    # them
    if source.is_cpu:
        bits = room.of(torch.int16, source).copy_(source.view(torch.int8))
        values.copy_(bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16))
        scales = scales * 256
    else:
        values.copy_(source)
    values.view(-1, min(rows, BLOCK), columns).mul_(
        scales.repeat_interleave(BLOCK, 1)[:, None, :columns]
    )
    target.copy_(values)
