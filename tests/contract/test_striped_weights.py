"""A learner of three ranks whose ranks all send; receivers are real processes, the ranks threads of
this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

import pytest
import torch
from test_weights import SETTINGS, Child, Spawn, ready, spawn  # noqa: F401  # fixture
from torch import Tensor
from waits import until
from weights_model import content, make_tensors, probe_logprobs, probe_of

from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.probe import check_probe
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.sender.send import WeightSender
from broker.weights.stripes.layout import ElementRun, even_runs, row_run, stripe_plan
from broker.weights.stripes.partial_digest import digest_of_parts
from broker.weights.stripes.stripe import StripeRank

PLAN = plan_of(make_tensors(0), 1)
RANKS = 3


def runs_of(rank: int, by_rows: bool) -> list[ElementRun]:
    tensors = make_tensors(0)
    if not by_rows:
        return even_runs({name: tensor.numel() for name, tensor in tensors.items()}, rank, RANKS)
    found = []
    for name, tensor in tensors.items():
        each = -(-len(tensor) // RANKS)
        count = min(each, len(tensor) - rank * each)
        found.append(row_run(name, tensor.shape, rank * each, count))
    return found


class Ranks:
    """The ranks of a learner, see ``broker.weights.stripes.lead.StripedWeights``."""

    def __init__(self, by_rows: bool = True) -> None:
        self.runs = [runs_of(rank, by_rows) for rank in range(RANKS)]
        self.plans = [stripe_plan(PLAN, runs) for runs in self.runs]
        self.ranks = [StripeRank(rank, PLAN, plan) for rank, plan in enumerate(self.plans)]
        self.own, self.tensors = self.ranks[0], make_tensors(0)

    def stage(self, version: int) -> str:
        sums = torch.zeros(1, dtype=torch.int64)
        for rank, runs in zip(self.ranks, self.runs, strict=True):
            parts = {
                run.key: self.tensors[run.name].flatten()[run.first : run.first + run.count]
                for run in runs
            }
            sums = sums + rank.stage(version, parts)
        return digest_of_parts(PLAN, sums)

    def serve(self, sender: WeightSender, stack: ExitStack) -> None:
        for rank in self.ranks[1:]:
            rank.serve(BoardClient(*sender.admit_rank(rank.rank), 2.0), SETTINGS)
        for rank in self.ranks:
            stack.callback(rank.close)


@pytest.fixture(params=["rows", "even"])
async def learner(
    bus: Bus, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[WeightSender, Ranks]]:
    ranks = Ranks(request.param == "rows")
    sender = WeightSender(bus, PLAN, epoch=1, settings=SETTINGS, stripes=ranks)
    await sender.start()
    with ExitStack() as stack:
        ranks.serve(sender, stack)
        yield sender, ranks
    await sender.close()


def offer(learner: tuple[WeightSender, Ranks], version: int, seed: int) -> str:
    sender, ranks = learner
    ranks.tensors = make_tensors(seed)
    sender.offer(version, {}, probe_of(ranks.tensors))
    return content(ranks.tensors)


async def loads(version: int, *children: Child) -> set[str]:
    return {(await child.hears(event="loaded", version=version))["content"] for child in children}


async def test_all_ranks_send_and_receivers_know_nothing_of_how_they_divide(
    learner: tuple[WeightSender, Ranks],
    spawn: Spawn,  # noqa: F811
) -> None:
    sender, _ = learner
    one, two = await spawn("r1"), await spawn("r2")
    await ready(one, two)
    for version in range(3):
        expected = offer(learner, version, 100 + version)
        assert await loads(version, one, two) == {expected}
    assert sender.metrics()["weights/communicators"] == 1
    late = await spawn("r3", seed=7)
    assert await loads(2, late) == {content(make_tensors(102))}
    os.kill(two.pid, signal.SIGKILL)
    expected = offer(learner, 3, 9)
    assert await loads(3, one, late) == {expected}
    assert sender.metrics()["weights/failures"] <= 1


async def test_the_digest_is_that_of_the_whole_model(
    learner: tuple[WeightSender, Ranks],
    spawn: Spawn,  # noqa: F811
) -> None:
    _, ranks = learner
    child = await spawn("r1", seed=5)  # it holds what is offered
    await ready(child)
    offer(learner, 0, 5)
    assert (await child.hears(event="loaded", version=0))["transferred"] is False
    whole = FlatBuffer(PLAN)
    whole.fill(ranks.tensors)
    assert ranks.stage(1) == whole.digest()


async def test_a_flipped_bit_is_not_loaded_and_a_rank_that_cannot_send_costs_a_try(
    learner: tuple[WeightSender, Ranks],
    spawn: Spawn,  # noqa: F811
) -> None:
    sender, ranks = learner
    held: dict[str, Tensor] = make_tensors(0)
    loaded: list[int] = []

    async def load(tensors: Mapping[str, Tensor], offered: wire.WeightsOffer) -> None:
        for name, tensor in tensors.items():
            held[name].copy_(tensor)
        check_probe(offered.probe, probe_logprobs(held))
        loaded.append(offered.version)

    receiver = WeightReceiver(sender._bus, "r1", held, load, bucket_mib=1, settings=SETTINGS)
    await receiver.start()
    try:
        expected = offer(learner, 0, 3)
        await receiver.wait_for(0)
        side = ranks.ranks[1]._staging._sides
        expected = offer(learner, 1, 4)
        for one in side:
            one.flat.buffer[100] ^= 16  # behind the digest of this rank's stripe
        await until(lambda: "digest of stripe 1" in receiver.last_error)
        assert loaded == [0]
        expected = offer(learner, 2, 6)
        await receiver.wait_for(2)
        assert content(held) == expected
        assert sender.metrics()["weights/failures"] >= 1
    finally:
        await receiver.close()
