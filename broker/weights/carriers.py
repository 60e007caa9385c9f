"""How weights travel between a learner and a server: which ways each has, and which one a pair
uses; pure functions.

    learner: offer.carriers, what it can send by                ["shared", "nccl", "gloo"]
    server:  join.carriers, what it can take, best first        {"nccl": 2, "gloo": 1}: 2 workers by nccl, else itself
    both:    the server's first that the learner offers         nccl

| carrier | how | the server needs |
|---|---|---|
| ipc | it reads the learner's GPU memory | that GPU, or a peer of it, and the learner's user |
| shared | it reads the learner's host memory | the learner's host and user |
| nccl | broadcast between GPUs | a GPU that the learner does not use |
| gloo | broadcast between host memories | a route to the learner |
| curve | fetched through the rendezvous, encrypted | a route to the rendezvous |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from broker.contract.wire import Carrier

# no communicator: the server reads the learner's memory
READ: Final[frozenset[Carrier]] = frozenset({"ipc", "shared"})
MAX_LOST: Final = 3  # consecutive failures of a carrier after which a server asks for another one
SETTINGS: Final[dict[str, tuple[Carrier, ...]]] = {  # by train.weights_backend, "auto" aside
    "shared": ("shared", "gloo"),
    "ipc": ("ipc", "gloo"),
    "nccl": ("nccl",),
    "gloo": ("gloo",),
    "curve": ("curve",),
}


def offered(setting: str, *, on_gpu: bool) -> tuple[Carrier, ...]:
    """Return what a learner offers for ``train.weights_backend``; with ``auto`` every server can
    take one of them.
    """
    if setting != "auto":
        return SETTINGS[setting]
    return ("nccl", "shared", "gloo") if on_gpu else ("shared", "gloo")


def choose(offers: Collection[Carrier], takes: Mapping[Carrier, int]) -> Carrier | None:
    """Return a server's best carrier among those that the learner offers; None without a common
    one.
    """
    return next((carrier for carrier in takes if carrier in offers), None)


def takes(
    *,
    reads: Carrier | None = None,
    workers: Mapping[Carrier, int] | None = None,
    on_gpu: bool = False,
    failed: Collection[Carrier] = (),
) -> dict[Carrier, int]:
    """Return what a server can take, best first, with the number of ranks that it brings.

    Args:
        reads: the carrier by which it has opened the learner's memory; None: it cannot.
        workers: carriers by which the engine's own workers receive, and their number.
        on_gpu: whether the server's process receives into a GPU that the learner does not use.
        failed: carriers that failed ``MAX_LOST`` times; left out unless nothing else remains.
    """
    ranks_by_carrier: dict[Carrier, int] = dict(workers or {})
    if reads == "ipc":
        ranks_by_carrier.setdefault("ipc", 1)
    if on_gpu:
        ranks_by_carrier.setdefault("nccl", 1)
    if reads == "shared":
        ranks_by_carrier.setdefault("shared", 1)
    ranks_by_carrier.setdefault("gloo", 1)
    ranks_by_carrier.setdefault("curve", 1)
    return {
        carrier: ranks for carrier, ranks in ranks_by_carrier.items() if carrier not in failed
    } or ranks_by_carrier


def of_workers(into: str, num_workers: int, *, on_gpu: bool) -> dict[Carrier, int]:
    """Return the carriers by which an engine's workers receive, best first, with their number.

    Args:
        into: ``rollout.weights_into``.
        on_gpu: whether each worker has a GPU of its own.
    """
    carriers: list[Carrier] = ["ipc", "nccl"] if on_gpu and into != "server" else []
    carriers += ["shared", "gloo"] if into == "workers" else []
    return dict.fromkeys(carriers, num_workers)


def refusal(offers: Sequence[Carrier], takes: Mapping[Carrier, int]) -> str:
    """Return why a server gets no weights, in one line."""
    ways = f"the learner sends by {', '.join(offers)}, this server takes {', '.join(takes)}"
    return f"{ways}; set train.weights_backend=auto"
