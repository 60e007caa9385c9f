"""The same DQN with actors in other processes, on rlearner's streams.

    python -m examples.cartpole.actors [--actors 4] [--seed 0] [--solved 475]

starts a private broker, the actors and, in this process, the learner; the last line is one JSON
object. More actors can join at any time with ``python -m examples.cartpole.actors --join URL --name
NAME``.

    learner --- assignments (work queue: one episode each) ---> actors
    learner <-- episodes (log: what was played, in order) ----- actors
    learner --- weights (offer; bytes through shared memory) -> actors

An actor acknowledges an assignment once its episode is stored, so another one plays it if an actor
dies; if both have played it, the first record counts. The learner keeps two assignments per actor
open: a slow learner makes actors wait instead of filling the log. It writes no checkpoint; a run
whose learner dies is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import gymnasium
import torch

from broker.contract import wire
from broker.errors import BrokerUnreachable, ServerDied
from broker.jetstream.bus import Bus
from broker.nats import addresses
from broker.runtime import process
from broker.server.private_server import BrokerServer
from broker.settings.arguments import count
from broker.system.children import spawn
from broker.system.entry import EXIT_STOPPED, enter
from broker.weights.memory.staging import plan_of
from broker.weights.receiver.receive import WeightReceiver
from broker.weights.sender.send import WeightSender
from examples.cartpole.dqn import Agent, Progress, epsilon, make_parser, play
from examples.cartpole.streams import (
    ASSIGNMENTS,
    BUCKET_MIB,
    EPISODES,
    QUEUE,
    SETTINGS,
    STREAMS,
    Assignment,
    Played,
    Policy,
    probe_of,
)

RUN: Final = "cartpole"
OPEN_PER_ACTOR: Final = 2
UPDATES_PER_VERSION: Final = 50
KEEP_EPISODES: Final = 200  # in the log, to look at


async def act(url: str, name: str) -> NoReturn:
    """Play what is assigned until this process is ended."""
    bus = await Bus.connect(url, RUN, name=name)
    await bus.ensure_streams(STREAMS)
    policy, env = Policy(), gymnasium.make("CartPole-v1")
    tensors = policy.network.state_dict()
    receiver = WeightReceiver(
        bus, name, tensors, policy.load, bucket_mib=BUCKET_MIB, settings=SETTINGS
    )
    await receiver.start()
    await receiver.wait_for(0)
    queue = await bus.work_queue(ASSIGNMENTS, QUEUE)
    while True:
        for delivery in await queue.fetch(1, 5.0):
            if isinstance(assignment := delivery.message, Assignment):
                version, network = policy.version, policy.network
                episode = await asyncio.to_thread(
                    play, env, network, assignment.seed, assignment.epsilon
                )
                played = Played(
                    assignment=delivery.seq,
                    actor=name,
                    version=version,
                    observations=wire.column(episode.observations, "<f4"),
                    actions=wire.column(episode.actions, "|u1"),
                    terminated=episode.terminated,
                )
                await bus.publish(EPISODES, played)
            else:
                why, data = delivery.error, delivery.data
                await bus.dead_letter(
                    ASSIGNMENTS, seq=delivery.seq, ticket=0, reason=why, data=data
                )
            await delivery.ack()


class Learner:
    """Assigns episodes, learns from them and offers the weights.

    Attributes:
        players: number of counted episodes of each actor.
        repeated: episodes that did not count, as another actor's was first.
        largest_lag: most versions between the weights of an episode and the newest ones.
    """

    def __init__(self, bus: Bus, options: argparse.Namespace) -> None:
        self._bus, self._seed, self._open = bus, options.seed, OPEN_PER_ACTOR * options.actors
        self.agent = Agent(options.seed)
        self.progress = Progress(options.seed, options.solved, options.max_steps)
        self._weights = self.agent.network.state_dict()
        plan = plan_of(self._weights, BUCKET_MIB)
        self._sender = WeightSender(bus, plan, epoch=1, settings=SETTINGS, gather_s=0.05)
        self.version, self._granted, self._counted = -1, 0, set[int]()
        self.players, self.repeated, self.largest_lag = dict[str, int](), 0, 0

    async def run(self) -> None:
        """Train until the policy is good enough."""
        await self._sender.start()
        self._offer()
        for _ in range(self._open):
            await self._assign()
        async for record in self._bus.read_log(EPISODES, 1):
            if not isinstance(played := record.message, Played):
                why = record.error
                await self._bus.dead_letter(
                    EPISODES, seq=record.seq, ticket=0, reason=why, data=record.data
                )
            elif played.assignment in self._counted:
                self.repeated += 1
            elif await self._learn(played):
                break
            await self._bus.trim(EPISODES, record.seq - KEEP_EPISODES)
        await self._sender.close()

    async def _learn(self, played: Played) -> bool:
        """Learn from an episode; return whether that was the last one."""
        self._counted.add(played.assignment)
        self.players[played.actor] = self.players.get(played.actor, 0) + 1
        self.largest_lag = max(self.largest_lag, self.version - played.version)
        if len(self._counted) % 20 == 1:
            print(f"episode {len(self._counted)} by {played.actor}", flush=True)
        await self._assign()  # before learning, so that the actor goes on at once
        await asyncio.to_thread(self.agent.learn, played.episode)
        if self.agent.updates >= (self.version + 1) * UPDATES_PER_VERSION:
            self._offer()
        return await asyncio.to_thread(self.progress.over, self.agent)

    async def _assign(self) -> None:
        self._granted += 1
        seed = self._seed * 1_000_003 + self._granted
        order = Assignment(seed=seed, epsilon=epsilon(self.agent.replay.total))
        await self._bus.publish(ASSIGNMENTS, order, key=QUEUE)

    def _offer(self) -> None:
        self.version = self.agent.updates // UPDATES_PER_VERSION
        self._sender.offer(self.version, self._weights, probe_of(self.agent.network))


async def learn(url: str, options: argparse.Namespace) -> dict[str, object]:
    """Run the learner; return its figures."""
    bus = await Bus.connect(url, RUN, name="learner")
    await bus.ensure_streams(STREAMS)
    learner = Learner(bus, options)
    await learner.run()
    await bus.close()
    agent = learner.agent
    counts = {
        "steps": agent.replay.total,
        "episodes": sum(learner.players.values()),
        "updates": agent.updates,
    }
    others = {
        "repeated": learner.repeated,
        "largest_lag": learner.largest_lag,
        "versions": learner.version + 1,
    }
    return {
        "mean_return": learner.progress.confirmed,
        **counts,
        **others,
        "episodes_by_actor": learner.players,
    }


async def watch(server: BrokerServer) -> None:
    """Raise ServerDied once the broker has ended; no other process would start it again."""
    while True:
        await asyncio.sleep(0.2)
        if not server.running:
            raise ServerDied("the private broker ended by itself, and so does the run")


async def distribute(options: argparse.Namespace) -> None:
    """Start a broker and the actors, run the learner in this process and print its figures."""
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="cartpole-") as folder,
        BrokerServer(f"{folder}/broker") as server,
    ):
        print(f"broker at {server.url}", flush=True)
        command = [sys.executable, "-m", "examples.cartpole.actors", "--join", server.url, "--name"]
        with (Path(folder) / "actors.log").open("wb") as log:
            actors = [spawn([*command, f"actor-{index}"], log) for index in range(options.actors)]
        try:
            for index, actor in enumerate(actors):
                print(f"actor-{index} has pid {actor.pid}", flush=True)
            async with asyncio.TaskGroup() as group:
                watching = group.create_task(watch(server))
                figures = await learn(server.url, options)
                watching.cancel()
        finally:
            for actor in actors:
                actor.terminate()
            for actor in actors:
                actor.wait()
    print(json.dumps({**figures, "seconds": round(time.monotonic() - started, 1)}))


def broker_address(text: str) -> str:
    """Parse the address of a broker."""
    try:
        addresses.split_servers(text)
    except BrokerUnreachable:
        shown, allowed = (
            addresses.without_passwords(text),
            "expected nats://host:port, or several separated by commas",
        )
        raise argparse.ArgumentTypeError(f"{shown!r} is not a broker address; {allowed}") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("actors", __doc__)
    parser.add_argument("--actors", type=count, default=4, help="actor processes (%(default)s)")
    parser.add_argument(
        "--join", type=broker_address, metavar="URL", help="be an actor on this broker"
    )
    parser.add_argument("--name", default=f"actor-{os.getpid()}", help="of an actor that joins")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.join is not None:
        return enter(lambda: asyncio.run(act(options.join, options.name)))
    return enter(
        lambda: process.main(
            "learner",
            lambda stop: process.unless_stopped(stop, distribute(options)),
            stopped_code=EXIT_STOPPED,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
