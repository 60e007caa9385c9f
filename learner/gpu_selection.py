"""Selects the GPUs that train (``rlearner start --gpus``), one rank on each, before torch loads."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from broker.errors import ConfigError, UserError
from broker.settings.config import UserSettings
from broker.system import gpus
from broker.system.devices import device_names, gpu_uuids
from broker.weights.carriers import CARRIERS, reading_carrier, selected_carrier
from broker.weights.carriers.selection import AUTO

SMI_TIMEOUT_S: Final = 20.0
# An ended learner's ranks may need seconds to free their memory.
RELEASE_WAIT_S: Final = 10.0
POLL_S: Final = 0.5

Users = dict[int, list[str]]


def gpu_users() -> Users:
    """Return the processes of each used GPU, as ``pid 4711 (python)``; none without nvidia-smi."""
    index_of = {uuid: index for index, uuid in gpu_uuids().items()}
    users: Users = {}
    for uuid, pid, name in _gpu_processes():
        if uuid in index_of:
            users.setdefault(index_of[uuid], []).append(f"pid {pid} ({name.rpartition('/')[2]})")
    return users


def _gpu_processes() -> list[list[str]]:
    """Return a GPU's UUID, a process's id and its name, for each process that uses a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    command = [smi, "--query-compute-apps=gpu_uuid,pid,process_name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            # The path of a program may have any bytes, and commas.
            errors="replace",
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [[field.strip() for field in line.split(",", 2)] for line in answer.stdout.split("\n")]
    return [row for row in rows if len(row) == 3] if answer.returncode == 0 else []


def refuse_taken(
    numbers: list[int],
    spec: str,
    read_users: Callable[[], Users] = gpu_users,
    wait_s: float = RELEASE_WAIT_S,
) -> None:
    """Wait up to ``wait_s`` for the GPUs to be free.

    Raises:
        UserError: if one of them is still in use; names it and its processes.
    """
    deadline = time.monotonic() + wait_s
    while busy := {number: users for number, users in read_users().items() if number in numbers}:
        if time.monotonic() >= deadline:
            number = min(busy)
            problem = f"--gpus {spec}: GPU {number} is taken by {', '.join(busy[number])}"
            raise UserError(f"{problem}; end that, choose others, or add --share-gpus")
        time.sleep(POLL_S)


def with_ranks(config: UserSettings, spec: str, num_gpus: int) -> UserSettings:
    """Return a user's configuration with one rank per GPU, or on the CPU without any.

    Raises:
        ConfigError: if it names another number of ranks, or another device.
    """
    train = config.get("train") or {}
    if not isinstance(train, dict):
        return config  # refused by validation
    device = "cuda" if num_gpus else "cpu"
    if train.get("device", "auto") not in ("auto", device):
        raise ConfigError(
            "train.device", train["device"], f"{device} with --gpus {spec}, or nothing"
        )
    if num_gpus and train.get("ranks", num_gpus) != num_gpus:
        allowed = f"{num_gpus} with --gpus {spec}, or nothing: each GPU gets a rank"
        raise ConfigError("train.ranks", train["ranks"], allowed)
    return {
        **config,
        "train": {**train, "device": device, **({"ranks": num_gpus} if num_gpus else {})},
    }


def with_weights_on_host(config: UserSettings) -> UserSettings:
    """Return a user's configuration that offers weights from host memory, off the shared GPUs.

    Raises:
        ConfigError: if it keeps them on a GPU.
    """
    train = config.get("train") or {}
    if not isinstance(train, dict):
        return config  # refused by validation
    setting = train.get("weights_backend") or AUTO
    carrier = selected_carrier(setting)
    if carrier is not None and carrier.on_gpu:
        on_host = [name for name in CARRIERS if not CARRIERS[name].on_gpu]
        names = f"{', '.join(on_host[:-1])} or {on_host[-1]}"
        allowed = f"{names} with --share-gpus: they leave no weights on the GPU"
        raise ConfigError("train.weights_backend", setting, allowed)
    if train.get("weights_stripes") == "always":
        raise ConfigError(
            "train.weights_stripes",
            "always",
            "never with --share-gpus: ranks stage stripes on their GPUs",
        )
    overrides = {
        "weights_backend": reading_carrier(on_gpu=False) if setting == AUTO else setting,
        "weights_stripes": "never",
    }
    return {**config, "train": {**train, **overrides}}


def shared_devices(device: str, spec: str) -> list[str]:
    """Return the names of the devices that a learner takes turns on.

    Args:
        device: checked ``train.device``.
        spec: the argument of ``--gpus``.
    """
    return device_names("cpu" if device == "cpu" else spec)


def forget_gpus(
    config: UserSettings, options: argparse.Namespace, *, has_size: bool = False
) -> UserSettings:
    """Return a run's settings without its last GPUs if --gpus names others; overrides stay.

    Args:
        has_size: whether a launcher says how many ranks there are now.
    """
    if not Path(options.config).is_dir() or (options.gpus == "auto" and not has_size):
        return config
    overridden = {override.partition("=")[0] for override in options.overrides}
    keys = ("ranks",) if options.gpus == "auto" else ("device", "ranks")
    removed = {key for key in keys if f"train.{key}" not in overridden}
    return {
        **config,
        "train": {key: value for key, value in config["train"].items() if key not in removed},
    }


def assign_gpus(config: UserSettings, spec: str, *, share: bool) -> UserSettings:
    """Select the GPUs and return the configuration for them.

    Args:
        spec: the argument of ``--gpus``; ``auto`` changes nothing.
        share: take turns with rollout servers, on GPUs that they may use now.

    Raises:
        UserError: if a GPU does not exist or is taken, or the configuration needs others.
    """
    config = with_weights_on_host(config) if share else config
    selection = gpus.select(spec)
    if selection == "auto":
        return config
    numbers = gpus.parse(spec) if selection == "cuda" else []
    assigned = with_ranks(config, spec, len(numbers))
    if not share:
        refuse_taken(numbers, spec)
    return assigned
