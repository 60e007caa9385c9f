"""How weights travel between a learner and a server: which ways each has, and which one a pair
uses; pure functions.

    learner: offer.carriers, what it can send by             ["shared", "gloo"]
    server:  join.carriers, what it can take, best first     {"shared": 2, "gloo": 1}: 2 workers
    both:    the server's first that the learner offers      shared
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from broker.contract.wire import Carrier
from broker.weights.carriers import CARRIERS, selected_carrier
from broker.weights.carriers.base import WeightCarrier

AUTO: Final = "auto"
MAX_LOST: Final = 3  # consecutive failures of a carrier after which a server asks for another one


def offered_carriers(setting: str, *, on_gpu: bool) -> tuple[Carrier, ...]:
    """Return what a learner offers for ``train.weights_backend``; with ``auto`` every server can
    take one of them.
    """
    if (selected := selected_carrier(setting)) is None:
        return tuple(
            name
            for name, carrier in CARRIERS.items()
            if carrier.is_automatic and (on_gpu or not carrier.on_gpu)
        )
    return (selected.name,) if selected.fallback is None else (selected.name, selected.fallback)


def choose_carrier(offers: Collection[Carrier], accepted: Mapping[Carrier, int]) -> Carrier | None:
    """Return a server's best carrier among those that the learner offers; None without a common
    one.
    """
    return next((carrier for carrier in accepted if carrier in offers), None)


def accepted_carriers(
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

    def is_usable(carrier: WeightCarrier) -> bool:
        if carrier.reads_memory:
            return carrier.name == reads
        return on_gpu or not carrier.claims_gpu

    ranks_by_carrier: dict[Carrier, int] = dict(workers or {})
    for name, carrier in CARRIERS.items():
        if is_usable(carrier):
            ranks_by_carrier.setdefault(name, 1)
    return {
        carrier: ranks for carrier, ranks in ranks_by_carrier.items() if carrier not in failed
    } or ranks_by_carrier


def worker_carriers(into: str, num_workers: int, *, on_gpu: bool) -> dict[Carrier, int]:
    """Return the carriers by which an engine's workers receive, best first, with their number.

    Args:
        into: ``rollout.weights_into``.
        on_gpu: whether each worker has a GPU of its own.
    """

    def is_usable(carrier: WeightCarrier) -> bool:
        if not carrier.serves_workers:
            return False
        return on_gpu and into != "server" if carrier.on_gpu else into == "workers"

    usable = [name for name, carrier in CARRIERS.items() if is_usable(carrier)]
    return dict.fromkeys(usable, num_workers)


def describe_refusal(offers: Sequence[Carrier], accepted: Mapping[Carrier, int]) -> str:
    """Return why a server gets no weights, in one line."""
    ways = f"the learner sends by {', '.join(offers)}, this server takes {', '.join(accepted)}"
    return f"{ways}; set train.weights_backend=auto"
