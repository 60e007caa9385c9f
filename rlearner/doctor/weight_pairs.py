"""Predicts how weights will travel between the learner and the servers of a run; pure functions.

What a server really takes depends on what it can open when it runs (``broker.weights.receiver``);
this is what to expect on working hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from broker.contract.wire import Carrier
from broker.weights.carriers import CARRIERS, READ, reading_carrier
from broker.weights.carriers.selection import (
    AUTO,
    accepted_carriers,
    choose_carrier,
    offered_carriers,
    worker_carriers,
)


@dataclass(frozen=True)
class WeightsSettings:
    """What decides how weights travel.

    Attributes:
        setting: ``train.weights_backend``.
        on_gpu: whether the learner computes on a GPU.
        engine: name of the servers' engine; empty: no servers follow the weights.
        to_device: whether the engine's server process takes new weights on its GPU.
        workers: number of the engine's workers, if they receive weights themselves; else 0.
        workers_need: what they need for that, in words.
        into: ``rollout.weights_into``.
        plain: whether whole models are sent unquantized, which workers require.
    """

    setting: str = AUTO
    on_gpu: bool = False
    engine: str = ""
    to_device: bool = False
    workers: int = 0
    workers_need: str = ""
    into: str = "auto"
    plain: bool = True


@dataclass(frozen=True)
class WeightPair:
    """The learner and a server: the server's place, the carrier (None: none), and the reason."""

    place: str
    carrier: Carrier | None
    reason: str


def weight_pairs(settings: WeightsSettings, num_gpus: int) -> list[WeightPair]:
    """Return how weights travel to servers at each place.

    Args:
        num_gpus: of this machine.
    """
    if not settings.engine:
        return []
    on_gpu = settings.on_gpu and num_gpus > 0
    # Place, whether it is the same host, whether the server has a GPU of its own.
    places = [("on this host", True, False)]
    if on_gpu:
        places = [("on the learner's GPU", True, False)]
        if num_gpus > 1:
            places.append(("on another GPU of this host", True, True))
    places.append(("on another host", False, on_gpu))
    return [
        _pair_with_server(settings, place, same_host, own_gpu, on_gpu=on_gpu)
        for place, same_host, own_gpu in places
    ]


def _pair_with_server(
    settings: WeightsSettings, place: str, same_host: bool, own_gpu: bool, *, on_gpu: bool
) -> WeightPair:
    workers: dict[Carrier, int] = {}
    if settings.workers and settings.plain:
        impossible: set[Carrier] = set()
        if not same_host:
            impossible |= READ
        if not own_gpu:
            impossible |= {name for name, carrier in CARRIERS.items() if carrier.claims_gpu}
        counts = worker_carriers(settings.into, settings.workers, on_gpu=on_gpu)
        workers = {carrier: count for carrier, count in counts.items() if carrier not in impossible}
    reads: Carrier | None = None
    if same_host:
        on_device = settings.to_device and on_gpu
        reads = reading_carrier(
            on_gpu=on_device and settings.setting == reading_carrier(on_gpu=True)
        )
    accepted: Mapping[Carrier, int] = accepted_carriers(
        reads=reads, workers=workers, on_gpu=own_gpu and settings.to_device
    )
    offers = offered_carriers(settings.setting, on_gpu=on_gpu)
    carrier = choose_carrier(offers, accepted)
    if carrier is None:
        if place == "on the learner's GPU":
            conflict = next((CARRIERS[name].gpu_conflict for name in offers), "")
            return WeightPair(place, None, conflict or "it takes host memory")
        return WeightPair(place, None, "it takes host memory")
    count = workers.get(carrier, 0)
    reason = CARRIERS[carrier].description
    if count:
        reason += f", into {count} worker{'s' * (count > 1)}"
        if settings.workers_need:
            reason += f" with {settings.workers_need}"
    return WeightPair(place, carrier, reason)
