"""torch.compile for the blocks of a transformers model, one by one: they are alike, so one is compiled for all."""

from __future__ import annotations

import os
import shutil
from typing import Any, Final

import torch

from broker.errors import ConfigError

_VARIANTS: Final = 32  # of one block: with and without gradient, adapters, packing, a row alone; beyond that torch gives up compiling


def compile_blocks(module: Any, device: torch.device) -> None:
    """Compile each transformer block in place, for rows of any length. What lies between them is left as it is.

    Compiling happens in the first passes. Kernels are picked by the first shapes that are seen, so two lives of a run may differ
    in the last bit.

    Raises:
        ConfigError: the model names no blocks, or there is no compiler.
    """
    prepare(device)
    for block in blocks_of(module):
        block.compile(dynamic=True)


def blocks_of(module: Any) -> list[Any]:
    """Its transformer blocks.

    Raises:
        ConfigError: it names none.
    """
    names = set(module._no_split_modules or ())
    if not (blocks := [block for block in module.modules() if type(block).__name__ in names]):
        raise ConfigError("train.compile", True, f"false: {type(module).__name__} names no blocks")
    return blocks


def prepare(device: torch.device) -> None:
    """
    Raises:
        ConfigError: there is no compiler.
    """
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        raise ConfigError("train.compile", True, "false: on a CPU it needs a C++ compiler, and neither g++ nor clang++ is on PATH")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
