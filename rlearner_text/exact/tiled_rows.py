"""Linear layers and elementwise functions whose result for a row does not depend on other rows.

A matrix product orders its sums by the number of rows: a token decoded alone and the same token in
a training batch differ in the last bits. Here every product has the same shape: ``TILE`` rows, the
last ones padded. Elementwise functions differ between full vector registers and what is left over,
so they get whole registers only. Gradients are the ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

# Rows of one matrix product. More waste a server's passes of few rows, fewer make training slow.
TILE: Final = 32
# Numbers that PyTorch computes in one thread (at::internal::GRAIN_SIZE); threads would cut a tensor
# at any number.
_PIECE: Final = 32_768
# Numbers: a multiple of two vector registers of any CPU.
_REGISTERS: Final = 64

Elementwise = Callable[[Tensor], Tensor]


def pad_front(tensor: Tensor, multiple: int) -> Tensor:
    """Pad the first dimension with zeros to a multiple; return the tensor itself if it is one."""
    missing = -len(tensor) % multiple
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))])


def linear_rows(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``rows @ weight.T + bias``, (n, out), computed ``TILE`` rows at a time.

    Args:
        rows: (n, in).
        weight: (out, in).
        bias: (out,), None for none.
    """
    rows = rows.contiguous()
    transposed = weight.t()
    # Not a view of padded rows: autograd refuses to change those in place.
    result = rows.new_empty(len(rows), len(weight))
    last = len(rows) - len(rows) % TILE
    for start in range(0, last, TILE):
        tile = slice(start, start + TILE)
        torch.mm(rows[tile], transposed, out=result[tile])
    if last < len(rows):
        result[last:] = torch.mm(pad_front(rows[last:], TILE), transposed)[: len(rows) - last]
    if bias is not None:
        result += bias
    return result


def map_elements(function: Elementwise, values: Tensor) -> Tensor:
    """Return ``function(values)`` of an elementwise function, in whole vector registers.

    Other devices than the CPU compute every element alike.
    """
    if values.device.type != "cpu":
        return function(values)
    padded = pad_front(values.reshape(-1), _REGISTERS)
    if len(padded) <= _PIECE:
        result = function(padded)
    else:
        result = torch.cat([function(piece) for piece in torch.split(padded, _PIECE)])
    return result[: values.numel()].view(values.shape)


class LinearRows(torch.autograd.Function):
    """``linear_rows`` with the gradient of an ordinary linear layer."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        return linear_rows(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        gradients: list[Tensor | None] = [None, None, None]
        if ctx.needs_input_grad[0]:
            gradients[0] = gradient @ weight
        if ctx.needs_input_grad[1]:
            gradients[1] = gradient.t() @ rows
        if ctx.has_bias and ctx.needs_input_grad[2]:
            gradients[2] = gradient.sum(0)
        return tuple(gradients)


class MapElements(torch.autograd.Function):
    """``map_elements`` with the gradient of the function itself."""

    @staticmethod
    def forward(ctx: Any, function: Elementwise, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        ctx.function = function
        return map_elements(function, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (values,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = values.detach().requires_grad_()
            (of_values,) = torch.autograd.grad(ctx.function(leaf), leaf, gradient)
        return None, of_values


def apply_linear(layer: torch.nn.Linear, inputs: Tensor) -> Tensor:
    """Replace ``layer.forward``, for inputs (…, in)."""
    rows = inputs.reshape(-1, inputs.shape[-1])
    if torch.is_grad_enabled():
        compute: Callable[..., Tensor] = LinearRows.apply
    else:
        compute = linear_rows
    result = compute(rows, layer.weight, layer.bias)
    return result.view(*inputs.shape[:-1], -1)


def apply_elementwise(function: Elementwise, values: Tensor) -> Tensor:
    """Replace the ``forward`` of an activation."""
    if torch.is_grad_enabled():
        apply: Callable[..., Tensor] = MapElements.apply
        return apply(function, values)
    return map_elements(function, values)
