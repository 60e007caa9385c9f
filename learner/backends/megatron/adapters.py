"""Adapters on Megatron's layers: peft's factors, divided like the layers.

peft's layers for Megatron (``LoraParallelLinear``) adapt fused matrices, whose factors engines do
not load, and need global groups. So peft creates the factors on a transformers model without
weights, with the names, first values and files of every other backend, and a hook adds each share's
contribution to the result of Megatron's layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.megatron.mapping import TensorPart, take_share, whole_view
from learner.backends.megatron.model import megatron_library
from learner.backends.megatron.tensor_exchange import TensorExchange
from learner.backends.models.lora import LoraAdapters
from learner.config import LoraSection


class MegatronAdapters(LoraAdapters):
    """See ``LoraAdapters``; ``module`` is on the meta device and stays unchanged.

    Attributes:
        first: the whole factors by the module's names, in host memory, until ``divide``.
        live: this rank's shares of the factors, after ``divide``.
        exchange: gathers and deals the shares.
    """

    exchange: TensorExchange

    def __init__(self, module: Any, section: LoraSection, seed: int, base: str) -> None:
        skeleton = _without_weights(module)
        super().__init__(skeleton, section, seed, base)
        self.first = {
            name: p.detach() for name, p in skeleton.named_parameters() if p.requires_grad
        }
        self.live: dict[str, nn.Parameter] = {}
        self._disabled = False

    def divide(
        self,
        model: nn.Module,
        parts: Sequence[TensorPart],
        grid: RankGrid,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        """Keep this rank's shares of the factors, and hook them into this stage's ``model``.

        Args:
            parts: of all stages.
        """
        adapted = [part for part in parts if len(self.parts(part.name)) > 1]
        factors = [factor for part in adapted for factor in self._parts_of(part)]
        shapes = {name: tensor.to("meta") for name, tensor in self.first.items()}
        self.exchange = TensorExchange(grid, groups, factors, shapes, device)
        for part in self.exchange.own:
            share = take_share(self.first[part.name], part.dim, grid.tp, grid.share)
            self.live[part.name] = nn.Parameter(share.to(device, copy=True).contiguous())
        # Neither the whole factors nor the skeleton are needed any more.
        self.first = {}
        self._layers = []
        holders: dict[str, list[TensorPart]] = {}
        for part in adapted:
            if part.stage == grid.stage:
                holders.setdefault(part.holder, []).append(part)
        for holder, parts_of_holder in holders.items():
            layer = model.get_submodule(holder.removesuffix(".weight"))
            hook = self._adding(layer, parts_of_holder, groups.tp, device)
            if grid.tp > 1:
                # As the layer itself, see ``MegatronPolicy.compile_blocks``.
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
            layer.register_forward_hook(hook)

    def _parts_of(self, part: TensorPart) -> list[TensorPart]:
        """Divide A's inputs like the layer's inputs, and B's outputs like its outputs."""
        _, a, b = self.parts(part.name)
        plain = replace(part, view=whole_view)
        factors = ((a, 1), (b, 0))
        return [
            replace(plain, name=name, holder=name, dim=dim if part.dim == dim else None)
            for name, dim in factors
        ]

    def _adding(
        self, layer: Any, parts: Sequence[TensorPart], group: Any, device: torch.device
    ) -> Callable[..., Any]:
        """Return a forward hook for one of Megatron's layers and its parts in Hugging Face's."""
        rows = torch.arange(layer.weight.shape[0], device=device)
        shares: list[tuple[Tensor, Tensor, Tensor, bool]] = []
        for part in parts:
            a, b = (self.live[name] for name in self.parts(part.name)[1:])
            # The outputs that the factors change, and whether ranks divide the inputs.
            shares.append((a, b, part.view(rows).flatten(), part.dim == 1))
        megatron = megatron_library()

        def hook(
            _: Any, arguments: tuple[Tensor, ...], outputs: tuple[Tensor, Any]
        ) -> tuple[Tensor, Any] | None:
            if self._disabled:
                return None
            result, bias = outputs
            inputs = arguments[0].float()
            total = result.float()
            for a, b, places, is_divided in shares:
                inner = functional.linear(inputs, a)
                # Divided inputs: sum the products forward. Whole inputs: sum gradients backward.
                sum_over = megatron.sum_of_shares if is_divided else megatron.sum_of_slopes
                inner = sum_over(inner, group=group)
                total = total.index_add(-1, places, functional.linear(inner, b), alpha=self._scale)
            return total.to(result.dtype), bias

        return hook

    def _disable(self, disabled: bool) -> None:
        self._disabled = disabled


def _without_weights(module: Any) -> Any:
    """Return a copy of the model for peft, whose linear layers have shapes but use no memory."""
    skeleton = copy.deepcopy(module)
    for layer in skeleton.modules():
        if isinstance(layer, nn.Linear):
            empty = torch.zeros((), dtype=layer.weight.dtype).expand(layer.weight.shape)
            layer.weight = nn.Parameter(empty, requires_grad=False)
    return skeleton
