"""Reads and replaces the tensors of a transformers model by name, without a copy where possible."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from broker.weights.memory.copying import copy_all
from rollout.engines.update_check import check_fit


class HeldWeights:
    """Parameters and persistent buffers of a model, tied ones once, under their first name.

    ``copies``: new tensors are copied into the present ones, whose addresses stay; otherwise they
    replace them where they can.
    """

    def __init__(self, model: torch.nn.Module, *, copies: bool = False) -> None:
        self.copies = copies
        every = dict(model.named_parameters(remove_duplicate=False))
        every |= {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if name not in every
        }
        # by address; meta tensors have none, but tied ones are one object
        first: dict[int, str] = {}
        # all tensors that share the memory of the first
        self._live: dict[str, list[torch.Tensor]] = {}
        for name, tensor in every.items():
            holder = (
                first.setdefault(tensor.data_ptr() or id(tensor), name) if tensor.numel() else name
            )
            live = self._live.setdefault(holder, [])
            if not any(tensor is tensor_held for tensor_held in live):
                live.append(tensor)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the current tensors by name, in model order."""
        return {name: live[0].detach() for name, live in self._live.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors from now on, copying those of another dtype, device or layout, or all.

        The whole update is checked before anything changes.

        Raises:
            TransferFailed: if a name is missing or unknown, or a shape differs.
        """
        # read each once: some mappings compute them
        current = self.tensors()
        new_tensors = dict(tensors)
        check_fit(current, new_tensors)
        copied = []
        for name, live in self._live.items():
            if not self.copies and all(_replaceable(tensor, new_tensors[name]) for tensor in live):
                for tensor in live:
                    tensor.data = new_tensors[name]
            else:
                copied.append((current[name], new_tensors[name]))
        copy_all(copied, torch.get_num_threads())
        if any(tensor.is_cuda for tensor in current.values()):
            # no pass still reads the old tensors: the caller may overwrite their memory
            torch.cuda.synchronize()


def _replaceable(current: torch.Tensor, new: torch.Tensor) -> bool:
    same_kind = current.dtype == new.dtype and current.device == new.device
    return same_kind and current.shape == new.shape and current.stride() == new.stride()
