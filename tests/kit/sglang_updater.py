"""The part of SGLang's workers that new weights go through, with the names and signatures of its
release 0.5.23, and modules under which its plugins find it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_wire import join

WORKERS = "sglang.srt.model_executor.model_runner_components.weight_updater"


class WeightUpdater:
    """One worker."""

    def __init__(self, tensors: Callable[[], dict[str, torch.Tensor]], tp_rank: int = 0) -> None:
        self.tp_rank, self.device, self.gpu_id = tp_rank, "cpu", 0
        self._tensors, self._model_update_group = tensors, dict[str, Any]()

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> tuple[bool, str]:
        assert (rank_offset, world_size, backend) == (1, 2, "gloo")
        self._model_update_group[group_name] = join(group_name, master_address, master_port)
        return True, "Succeeded to initialize custom process group."

    def destroy_weights_update_group(self, group_name: str) -> tuple[bool, str]:
        if self._model_update_group.pop(group_name, None) is None:
            return False, "The group to be destroyed does not exist."
        return True, "Succeeded to destroy custom process group."

    def receive_weights_from_distributed(
        self,
        *,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: Any = None,
    ) -> list[tuple[str, torch.Tensor]]:
        group = self._model_update_group[group_name]
        rows = zip(names, dtypes, shapes, strict=True)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in rows
        }
        waiting = [
            torch.distributed.broadcast(tensor, src=0, group=group, async_op=True)
            for tensor in tensors.values()
        ]
        for work in waiting:
            work.wait()
        return list(tensors.items())

    def load_weights_from_distributed(
        self, named_tensors: list[tuple[str, torch.Tensor]]
    ) -> tuple[bool, str]:
        try:
            held = self._tensors()
            for name, tensor in named_tensors:
                held[name].copy_(tensor)
        except (RuntimeError, KeyError) as error:
            return False, f"Failed to update parameter online: {error}."
        return True, "Succeeded to update parameter online."


class HookType(Enum):
    AROUND = "around"


def pretend_modules(patch: pytest.MonkeyPatch, *, num_workers: int = 1, group: Any = None) -> None:
    """Modules that a plugin imports; hooks apply at once, and until the test ends."""

    def register(target: str, hook: Callable[..., Any], kind: HookType) -> None:
        assert kind is HookType.AROUND
        module, name = target.rsplit(".", 1)
        assert module == f"{WORKERS}.WeightUpdater"
        original = getattr(WeightUpdater, name)
        patch.setattr(WeightUpdater, name, lambda *args, **named: hook(original, *args, **named))

    contents: dict[str, dict[str, Any]] = {
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=register),
            "HookType": HookType,
        },
        "sglang.srt.distributed.parallel_state": {
            "get_tp_group": partial(SimpleNamespace, world_size=num_workers, cpu_group=group)
        },
    }
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            patch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)
