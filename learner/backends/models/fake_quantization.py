"""Runs the learner's model with the rounded weights of the servers, a module at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from broker.weights import fp8
from learner.backends.models.policy import PolicyModel


@contextmanager
def quantized_as_sent(policy: PolicyModel) -> Iterator[None]:
    """Compute with weights as ``broker.weights.fp8`` rounds them; for passes without gradient.

    Each module's weights are rounded when it is called and restored when it returns. So only one
    module's weights are held twice, and backends that gather a block's weights for its pass (FSDP2,
    ZeRO) need not gather the model.
    """
    adapters = policy.adapters
    with ExitStack() as stack:
        modules = dict(policy.module.named_modules())
        if any(module._compiled_call_impl is not None for module in modules.values()):
            # Compiled blocks would ignore the hooks.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if adapters is not None:
            # The rounded weights have the adapters merged in.
            stack.enter_context(adapters.off())

        def live(name: str) -> Tensor:
            owner, _, last = name.rpartition(".")
            tensor: Tensor = _parameters_of(modules[owner])[last]
            return tensor.detach()

        for name, module in modules.items():
            plain = {
                last: f"{name}.{last}".removeprefix(".")
                for last, weight in _parameters_of(module).items()
                if weight is not None
            }
            if adapters is not None:
                plain = {
                    last: adapters.names[full]
                    for last, full in plain.items()
                    if full in adapters.names
                }
            if plain:
                swap = _Swap(plain, lambda whole: policy.whole(whole, live))
                stack.callback(module.register_forward_pre_hook(swap.put).remove)
                # Before other hooks, which may free or divide the weights.
                hook = module.register_forward_hook(swap.back, always_call=True, prepend=True)
                stack.callback(hook.remove)
        yield


class _Swap:
    """Replaces one module's weights while it computes."""

    def __init__(self, names: dict[str, str], whole: Any) -> None:
        self._names = names
        self._whole = whole
        self._originals: dict[str, Any] = {}

    @torch.no_grad()
    def put(self, module: nn.Module, _: Any) -> None:
        """Put the rounded weights in."""
        own = _parameters_of(module)
        for last, name in self._names.items():
            weight = self._whole(name)
            rounded = fp8.as_sent(name, weight)
            if rounded is not weight or weight.data_ptr() != own[last].data_ptr():
                self._originals[last] = own[last]
                own[last] = nn.Parameter(rounded, requires_grad=False)

    def back(self, module: nn.Module, *_: Any) -> None:
        """Restore the module's weights."""
        _parameters_of(module).update(self._originals)
        self._originals.clear()


def _parameters_of(module: nn.Module) -> Any:
    return module._parameters
