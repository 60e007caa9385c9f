"""Adapters on Megatron's layers: peft's factors, divided as the layers are.

peft has layers for Megatron (``LoraParallelLinear``), but on Megatron's own matrices, queries with keys and values, gate with up, whose
factors no engine takes, and in Megatron's global groups, of which there are none here. So peft makes its factors on a transformers model
without weights; their names, first values and files are those of every other backend. What a factor adds is added where Megatron's layer
gives its result, each share of a layer by the rank that holds it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learner.backends.lora import Adapters
from learner.backends.megatron.exchange import Exchange
from learner.backends.megatron.grid import Grid, Groups
from learner.backends.megatron.mapping import Part, as_it_is, take_share
from learner.backends.megatron.model import library
from learner.config import LoraSection


class MegatronAdapters(Adapters):
    """See ``learner.backends.lora.Adapters``.

    Args:
        module: transformers' model, on the meta device; left as it is.

    Attributes:
        first: the factors by the module's names, whole, in host memory, until ``divide``.
        live: this rank's shares of them, from then on.
        exchange: for those.
    """

    exchange: Exchange

    def __init__(self, module: Any, section: LoraSection, seed: int, base: str) -> None:
        skeleton = _without_weights(module)
        super().__init__(skeleton, section, seed, base)
        self.first = {name: parameter.detach() for name, parameter in skeleton.named_parameters() if parameter.requires_grad}
        self.live: dict[str, nn.Parameter] = {}
        self._disabled = False

    def divide(self, model: nn.Module, parts: Sequence[Part], grid: Grid, groups: Groups, device: torch.device) -> None:
        """Keep this rank's shares of the factors, and let them take part in the model's passes.

        Args:
            model: Megatron's, of this stage.
            parts: of the model's weights, in all stages.
        """
        adapted = [part for part in parts if len(self.parts(part.name)) > 1]
        factors = [one for part in adapted for one in self._parts_of(part)]
        shapes = {name: tensor.to("meta") for name, tensor in self.first.items()}
        self.exchange = Exchange(grid, groups, factors, shapes, device)
        for part in self.exchange.own:
            share = take_share(self.first[part.name], part.dim, grid.tp, grid.share)
            self.live[part.name] = nn.Parameter(share.to(device, copy=True).contiguous())
        self.first, self._layers = {}, []  # the whole factors go
        holders: dict[str, list[Part]] = {}
        for part in adapted:
            if part.stage == grid.stage:
                holders.setdefault(part.holder, []).append(part)
        for holder, together in holders.items():
            layer = model.get_submodule(holder.removesuffix(".weight"))
            hook = self._adding(layer, together, groups.tp, device)
            if grid.tp > 1:
                hook = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]  # as the layer, see ``compile_blocks``
            layer.register_forward_hook(hook)

    def _parts_of(self, part: Part) -> list[Part]:
        """Of A the inputs are divided where those of the layer are, of B the outputs."""
        _, a, b = self.parts(part.name)
        plain = replace(part, view=as_it_is)
        return [
            replace(plain, name=a, holder=a, dim=1 if part.dim == 1 else None),
            replace(plain, name=b, holder=b, dim=0 if part.dim == 0 else None),
        ]

    def _adding(self, layer: Any, together: Sequence[Part], group: Any, device: torch.device) -> Callable[..., Any]:
        """A hook behind one of Megatron's layers, which computes what several of Hugging Face's do."""
        rows = torch.arange(layer.weight.shape[0], device=device)
        of_each: list[tuple[Tensor, Tensor, Tensor, bool]] = []
        for part in together:
            a, b = (self.live[name] for name in self.parts(part.name)[1:])
            of_each.append((a, b, part.view(rows).flatten(), part.dim == 1))  # where its outputs lie; whether inputs are divided
        megatron = library()

        def hook(_: Any, arguments: tuple[Tensor, ...], found: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
            if self._disabled:
                return None
            result, bias = found
            inputs, total = arguments[0].float(), result.float()
            for a, b, where, parted in of_each:
                inner = functional.linear(inputs, a)
                inner = (megatron.sum_of_shares if parted else megatron.sum_of_slopes)(inner, group=group)
                total = total.index_add(-1, where, functional.linear(inner, b), alpha=self._scale)
            return total.to(result.dtype), bias

        return hook

    def _disable(self, disabled: bool) -> None:
        self._disabled = disabled


def _without_weights(module: Any) -> Any:
    """The model with linear layers in host memory that take no room there, for peft to put factors beside them."""
    skeleton = copy.deepcopy(module)
    for layer in skeleton.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(torch.zeros((), dtype=layer.weight.dtype).expand(layer.weight.shape), requires_grad=False)
    return skeleton
