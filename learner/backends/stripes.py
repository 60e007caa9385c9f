"""Sends weights from all ranks: each broadcasts the elements that it holds; none gathers the model.

    rank 0                                             rank 1 … N-1
    open: OpenStripesCommand(plan)  --- link -------->  divides the plan by what it holds
                                    <-----------------  StripeReply: the plan of its stripe
    serve: ServeStripesCommand      ----------------->  waits at the rendezvous, in a thread
    stage(version)                  ----------------->  copies its stripe, sums the digest's part
    broker.weights.stripes.lead     -- rendezvous --->  broadcasts its stripe

See ``broker.weights.stripes`` for the transfer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from broker.system.connections import address_towards
from broker.weights import plan as plans
from broker.weights.plan import LayoutPlan
from broker.weights.protocol.session import TransferSettings
from broker.weights.rendezvous.board_client import BoardClient, KeyPair, RendezvousAddress
from broker.weights.stripes.layout import check_cover, stripe_plan
from broker.weights.stripes.partial_digest import digest_of_parts
from broker.weights.stripes.stripe import StripeRank
from learner.backends.ranks.group import RankGroup
from learner.backends.ranks.messages import (
    CollectiveCommand,
    OpenStripesCommand,
    ServeStripesCommand,
    StripeReply,
)
from learner.backends.sent_runs import RunsInOrder, SentRun
from learner.backends.weights import PolicyWeights


class OwnStripe:
    """What this rank sends.

    Args:
        model: plan of the whole model.
    """

    def __init__(
        self, model: LayoutPlan, weights: PolicyWeights, ranks: RankGroup, device: torch.device
    ) -> None:
        self._weights = weights
        self._ranks = ranks
        self._device = device
        plan = stripe_plan(model, [sent_run.run for sent_run in self._sent() if sent_run.run.count])
        self.stripe = StripeRank(ranks.rank, model, plan, device if device.type == "cuda" else None)

    def _sent(self) -> Iterator[SentRun]:
        return self._weights.sent_runs(self._ranks.rank, self._ranks.size)

    @torch.no_grad()
    def stage(self, version: int) -> Tensor:
        """Copy a version; all ranks call it together.

        Returns:
            On rank 0 the sums of all ranks, for the model's digest.
        """
        runs = RunsInOrder(self._sent())
        sums = self.stripe.stage(version, runs).to(self._device)
        # The other ranks may read runs of which this rank sends nothing.
        runs.finish()
        if self._ranks.size > 1:
            dist.reduce(sums, 0)
        return sums.cpu()

    def serve(self, command: ServeStripesCommand) -> None:
        """Wait in a thread for rank 0's orders."""
        address = RendezvousAddress(command.host, command.port, command.key)
        keys = KeyPair(command.public, command.secret.encode())
        own = address_towards(command.host, command.port)
        settings = TransferSettings(
            host=own, timeout_s=command.timeout_s, connect_timeout_s=command.connect_timeout_s
        )
        self.stripe.serve(BoardClient(address, keys, command.connect_timeout_s), settings)


class RankStripes:
    """All ranks' stripes at rank 0, see ``broker.weights.stripes.lead.StripedWeights``."""

    def __init__(self, model: LayoutPlan, own: OwnStripe, ranks: RankGroup) -> None:
        self._model = model
        self._own = own
        self._ranks = ranks
        replies = ranks.ask(OpenStripesCommand(model.text))
        other_plans = [
            plans.from_text(reply.plan) for reply in replies if isinstance(reply, StripeReply)
        ]
        self.own = own.stripe
        self.plans = [own.stripe.plan, *other_plans]
        check_cover(model, self.plans)

    def stage(self, version: int) -> str:
        """Copy a version on all ranks and return the model's digest."""
        sums = self._ranks.together(
            CollectiveCommand("stage", [version]), partial(self._own.stage, version)
        )
        return digest_of_parts(self._model, sums)

    def serve(
        self, admitted: Sequence[tuple[RendezvousAddress, KeyPair]], settings: TransferSettings
    ) -> None:
        """Have the other ranks wait for orders at the rendezvous.

        Args:
            admitted: for each of them, where it is and the keys that admit it.
        """
        for rank, (address, keys) in enumerate(admitted, 1):
            command = ServeStripesCommand(
                host=address.host,
                port=address.port,
                key=address.key,
                public=keys.public,
                secret=keys.secret.decode(),
                timeout_s=settings.timeout_s,
                connect_timeout_s=settings.connect_timeout_s,
            )
            self._ranks.send_to(rank, command)
