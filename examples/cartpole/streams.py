"""What learner and actors exchange: two messages, two streams of their own, and a Q-network on the
weights channel.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from broker.contract import wire
from broker.contract.streams import DEAD, LOG, WEIGHTS, WEIGHTSYNC, WORK_QUEUE, Stream
from broker.weights.probe import check_probe, make_probe
from broker.weights.protocol.session import TransferSettings
from examples.cartpole.dqn import OBSERVATION, Episode, QNetwork

BUCKET_MIB: Final = 1.0  # of the weights, the same at both ends
SETTINGS: Final = TransferSettings(carriers=("shared", "gloo"))
# observations with known answers
PROBE: Final = torch.linspace(-1.0, 1.0, 4 * OBSERVATION).reshape(4, OBSERVATION)


class Assignment(wire.Message, frozen=True):
    """Permission to play one episode; its number is its sequence in the stream."""

    seed: int
    epsilon: float  # share of random actions


class Played(wire.Message, frozen=True):
    """The episode of one assignment, of n steps."""

    assignment: int
    actor: str
    version: int  # of the weights
    observations: wire.Column  # <f4, shape (n + 1) * OBSERVATION
    actions: wire.Column  # |u1, shape (n,)
    terminated: bool

    def __post_init__(self) -> None:
        if (dtypes := (self.observations.dtype, self.actions.dtype)) != ("<f4", "|u1"):
            raise ValueError(
                f"observations and actions must be <f4 and |u1, not {' and '.join(dtypes)}"
            )
        n = len(self.actions.data)
        if n < 1 or len(self.observations.data) != 4 * OBSERVATION * (n + 1):
            raise ValueError(
                "observations must be one more than actions, of which there is at least one"
            )

    @property
    def episode(self) -> Episode:
        """What was played, as the replay buffer takes it."""
        return Episode(
            self.observations.array().reshape(-1, OBSERVATION),
            self.actions.array(),
            self.terminated,
        )


ASSIGNMENTS: Final = Stream("assignments", WORK_QUEUE, (Assignment,), key="queue")
EPISODES: Final = Stream("played", LOG, (Played,))
STREAMS: Final = (ASSIGNMENTS, EPISODES, WEIGHTS, WEIGHTSYNC, DEAD)
QUEUE: Final = "actors"  # the only key of ASSIGNMENTS


@torch.no_grad()
def _probe_values(network: nn.Module) -> Tensor:
    """Return log-probabilities of the first action at the probe's observations, shape
    (len(PROBE),).
    """
    return torch.log_softmax(network(PROBE), 1)[:, 0]


def probe_of(network: nn.Module) -> wire.Probe:
    """Return what an actor must compute, too, before it plays with these weights."""
    return make_probe(range(len(PROBE) + 1), _probe_values(network).numpy(), tolerance=1e-3)


class Policy:
    """An actor's network. Each version replaces it as a whole, so that an episode is played with
    one version.
    """

    def __init__(self) -> None:
        self.network, self.version = QNetwork(), -1

    async def load(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        """Take a version of the weights; without tensors, the weights are the same as before."""
        network = copy.deepcopy(self.network)
        network.load_state_dict(tensors, strict=bool(tensors))
        check_probe(offer.probe, _probe_values(network).numpy())
        self.network, self.version = network, offer.version
