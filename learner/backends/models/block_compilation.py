"""Applies torch.compile to each transformer block, so that equal blocks share compiled code."""

from __future__ import annotations

import os
import shutil
from typing import Any, Final

import torch

from broker.errors import ConfigError

# Of one block, by gradient, adapters, packing and single rows. Beyond the limit torch would run the
# block uncompiled, without an error.
_VARIANTS: Final = 32


def compile_blocks(module: Any, device: torch.device) -> None:
    """Compile each transformer block in place, for rows of any length, during the first passes.

    Kernels are chosen by the first shapes, so a resumed run may differ in the last bit.

    Raises:
        ConfigError: if the model names no blocks, or there is no compiler.
    """
    check_compiler(device)
    for block in blocks_of(module):
        block.compile(dynamic=True)


def blocks_of(module: Any) -> list[Any]:
    """Return the transformer blocks.

    Raises:
        ConfigError: if the model names none.
    """
    names = set(module._no_split_modules or ())
    if not (blocks := [block for block in module.modules() if type(block).__name__ in names]):
        raise ConfigError("train.compile", True, f"false: {type(module).__name__} names no blocks")
    return blocks


def check_compiler(device: torch.device) -> None:
    """Check for a compiler and raise torch's limit of variants.

    Raises:
        ConfigError: if there is no compiler.
    """
    if device.type == "cpu" and not any(
        shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")
    ):
        allowed = "false: on a CPU it needs a C++ compiler, and neither g++ nor clang++ is on PATH"
        raise ConfigError("train.compile", True, allowed)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VARIANTS)
