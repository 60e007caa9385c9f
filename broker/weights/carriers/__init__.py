"""Registry of weight carriers; a new one is one file, one line here and its name in
``wire.Carrier``. No module of this package imports torch before two ends meet.

| carrier | how | the server needs |
|---|---|---|
| ipc | it reads the learner's GPU memory | that GPU, or a peer of it, and the learner's user |
| nccl | broadcast between GPUs | a GPU that the learner does not use |
| shared | it reads the learner's host memory | the learner's host and user |
| gloo | broadcast between host memories | a route to the learner |
| curve | fetched through the rendezvous, encrypted | a route to the rendezvous |

Snapshots (``broker.weights.snapshots``) are no carrier: a server reads them without the learner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from broker.contract.wire import Carrier
from broker.weights.carriers.base import WeightCarrier
from broker.weights.carriers.curve import CURVE
from broker.weights.carriers.gloo import GLOO
from broker.weights.carriers.ipc import IPC
from broker.weights.carriers.nccl import NCCL
from broker.weights.carriers.shared import SHARED

# best first: a server prefers the earlier of two that it can use
CARRIERS: Final[Mapping[Carrier, WeightCarrier]] = {
    carrier.name: carrier for carrier in (IPC, NCCL, SHARED, GLOO, CURVE)
}
# no communicator: the server reads the learner's memory
READ: Final = frozenset(name for name, carrier in CARRIERS.items() if carrier.reads_memory)


def selected_carrier(setting: str | None) -> WeightCarrier | None:
    """Return the carrier that ``train.weights_backend`` names; None: each server has its own."""
    return next((carrier for carrier in CARRIERS.values() if carrier.name == setting), None)


def reading_carrier(*, on_gpu: bool) -> Carrier:
    """Return the carrier by which a server reads GPU memory, or host memory."""
    return next(name for name in CARRIERS if name in READ and CARRIERS[name].on_gpu == on_gpu)
