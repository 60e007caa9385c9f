"""Divides the ranks of a run over nodes: ``train.ranks`` counts all, ``--gpus`` those here."""

from __future__ import annotations

from broker.errors import ConfigError, UserError
from broker.settings.config import UserSettings
from broker.system import gpus
from learner.gpu_selection import refuse_taken
from learner.nodes.placement import Placement


def lay_out(
    config: UserSettings, placement: Placement, spec: str, *, share: bool
) -> tuple[UserSettings, int]:
    """Select this node's GPUs; return the configuration and the number of ranks here.

    Args:
        config: the user's, not validated.
        spec: the argument of ``--gpus``.
        share: allow GPUs that other processes use.

    Raises:
        UserError: if a GPU does not exist or is taken, or numbers contradict each other.
    """
    device = gpus.select(spec)
    numbers = gpus.parse(spec) if device == "cuda" else []
    # Under torchrun or srun this node's other ranks may use them already.
    if numbers and not share and placement.local_rank is None:
        refuse_taken(numbers, spec)
    return divide_ranks(config, placement, spec, len(numbers))


def divide_ranks(
    config: UserSettings, placement: Placement, spec: str, num_gpus: int
) -> tuple[UserSettings, int]:
    """Return the configuration with ``train.ranks``, and the number of ranks on this node.

    Raises:
        ConfigError: if ``train.ranks`` or ``train.device`` is another one, or does not divide.
    """
    train = config.get("train") or {}
    if not isinstance(train, dict):
        # Validation refuses it.
        return config, 1
    device = None
    if spec != "auto":
        device = "cuda" if num_gpus else "cpu"
    if device and train.get("device", "auto") not in ("auto", device):
        raise ConfigError(
            "train.device", train["device"], f"{device} with --gpus {spec}, or nothing"
        )
    nodes = placement.num_nodes
    configured = train.get("ranks")
    if placement.size is not None and configured not in (None, placement.size):
        raise ConfigError(
            "train.ranks", configured, f"{placement.size} under {placement.source}, or nothing"
        )
    size = placement.size or configured or max(num_gpus, 1) * nodes
    if not isinstance(size, int) or size < nodes:
        allowed = f"at least {nodes}, the ranks of all nodes together with {placement.source}"
        raise ConfigError("train.ranks", size, allowed)
    if placement.local_size and num_gpus and num_gpus < placement.local_size:
        reason = f"{placement.source} starts {placement.local_size} ranks on this node"
        raise UserError(f"--gpus {spec}: {reason}, which need a GPU each")
    num_here = placement.local_size or num_gpus
    if not num_here:
        if size % nodes:
            allowed = (
                f"a multiple of {nodes} nodes, or --gpus on each node to say how many ranks it has"
            )
            raise ConfigError("train.ranks", size, allowed)
        num_here = size // nodes
    train = {**train, "ranks": size}
    if device:
        train["device"] = device
    return {**config, "train": train}, num_here
