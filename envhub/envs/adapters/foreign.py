"""Helpers of the adapters to other libraries: their import, one-line errors, and seeds."""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

from broker.errors import NotInstalled
from envhub.envs.base import Split


def library(env: str, module: str, install: str) -> Any:
    """Import a module that an environment needs.

    Args:
        env: name of the environment in the registry.
        install: how to install the library.

    Raises:
        NotInstalled: if the module, or something that it imports, is missing.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise NotInstalled(f"environment {env}: {error}; {install}") from None


def one_line(error: Exception) -> str:
    """Return the beginning of an error's text in one line."""
    return " ".join(str(error).split())[:300]


def seed_of(task_index: int, split: Split, seed: int) -> int:
    """Return a task's seed of 31 bits: odd in training; in evaluation even, whatever ``seed``."""
    key = f"{task_index}/{seed if split == 'train' else 'eval'}".encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") >> 1
    return number & ~1 | (split == "train")
