"""What the adapters to other libraries' environments share: the library itself, and seeds that keep evaluation apart
from training.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

from broker.errors import NotInstalled
from envhub.envs.base import Split


def library(env: str, module: str, install: str) -> Any:
    """The imported module.

    Args:
        env: the environment's name in the registry.
        module: what to import.
        install: what the user types to get it.

    Raises:
        NotInstalled: it, or something that it needs, is not there.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise NotInstalled(f"environment {env}: {error}; {install}") from None


def seed_of(task_index: int, split: Split, seed: int) -> int:
    """A seed of 31 bits for libraries that make a task from a seed: odd in training, even and without ``seed`` in
    evaluation.
    """
    told = f"{task_index}/{seed if split == 'train' else 'eval'}".encode()
    number = int.from_bytes(hashlib.blake2b(told, digest_size=4).digest(), "little") >> 1
    return number & ~1 | (split == "train")
