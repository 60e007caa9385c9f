"""A run with rollout servers that answer from a script, around one environment hub under test."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from waits import LONG_S

from broker.channel import carriers
from broker.contract import wire
from broker.contract.streams import EVALTICKETS, SAMPLES, TICKETS, Stream
from broker.jetstream.bus import Bus
from broker.jetstream.publish import MESSAGE_ID, store_message
from broker.runtime.announce import Announcer
from broker.runtime.process import Stop, add_join_options
from broker.settings import runspec
from envhub.service import serve
from rlearner_text.config import TinyModel
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

KIT = str(Path(__file__).with_name("envhub_kit.py"))
LAKE: dict[str, Any] = {
    "env": "frozenlake",
    "max_turns": 8,
    "group_size": 2,
    "sampling": {"max_tokens": 4},
}

Script = Callable[[wire.GenerateRequest, str], str | Awaitable[str]]


class Server:
    """A rollout server whose text comes from a script of (request, context)."""

    def __init__(
        self, world: World, name: str, script: Script, *, policy: str = "actor", version: int = 0
    ) -> None:
        self.world, self.name, self.script, self.policy, self.version = (
            world,
            name,
            script,
            policy,
            version,
        )
        self.asked: list[wire.GenerateRequest] = []
        self.aborted: list[str] = []
        self.channel = carriers.make_server("zmq", world.bus, name)
        self.announcer = Announcer(world.bus, self.presence, every_s=0.5)

    async def start(self) -> None:
        await self.channel.start(self.answer, self.aborted.append)
        await self.announcer.start()

    async def close(self) -> None:
        await self.announcer.close()
        await self.channel.close()

    def presence(self) -> wire.Presence:
        return wire.Presence(
            role="rollout",
            id=self.name,
            host="h",
            pid=1,
            state="serving",
            address=self.channel.address,
            channel="zmq",
            policy=self.policy,
            epoch=1,
            policy_version=self.version,
            slots=64,
        )

    async def answer(self, request: wire.GenerateRequest) -> wire.GenerateReply:
        self.asked.append(request)
        tokenizer = self.world.tokenizer
        text = self.script(
            request, tokenizer.decode(request.token_ids.array().tolist(), skip_special_tokens=False)
        )
        text = text if isinstance(text, str) else await text
        end = tokenizer.token_id("<|im_end|>")
        assert end is not None
        ids = [*tokenizer.encode(text), end][: request.sampling.max_tokens]
        return wire.GenerateReply(
            request_id=request.request_id,
            server=self.name,
            token_ids=wire.column(ids, "<i4"),
            logprobs=wire.column([-0.25] * len(ids), "<f4"),
            version_runs=wire.column([self.version, len(ids)], "<i4"),
            finish_reason="stop" if ids[-1] == end else "length",
            policy_version=self.version,
        )


class World:
    """One run on the session's broker."""

    def __init__(self, bus: Bus, url: str, folder: Path) -> None:
        self.bus, self.url, self.folder = bus, url, folder
        _write_tokenizer(folder, TinyModel())
        self.tokenizer = Tokenizer.load(folder)
        self.servers: list[Server] = []
        self.children: list[subprocess.Popen[str]] = []
        self._issued = {TICKETS: 0, EVALTICKETS: 0}

    async def publish_spec(self, domains: dict[str, Any], **fields: Any) -> None:
        sections = {
            "broker": {},
            "model": {},
            "train": {},
            "eval": {},
            "envhub": {"drain_timeout_s": 10},
        }
        config = {**sections, "domains": domains, **fields.pop("sections", {})}
        config["envhub"] = {
            "episode_timeout_s": 300.0,
            "generate_timeout_s": 120.0,
            **config["envhub"],
        }
        spec = wire.RunSpec(
            run=self.bus.run,
            wire_version=wire.WIRE_VERSION,
            epoch=1,
            config=config,
            model_path=str(self.folder),
            **fields,
        )
        await runspec.publish_runspec(self.bus, spec)

    async def server(
        self, name: str = "s1", script: Script = lambda *_: "R", **kwargs: Any
    ) -> Server:
        server = Server(self, name, script, **kwargs)
        self.servers.append(server)
        await server.start()
        return server

    async def ticket(self, domain: str = "lake", **fields: Any) -> int:
        """Publish a training ticket; its number."""
        self._issued[TICKETS] += 1
        number = self._issued[TICKETS]
        size = fields.get("group_size", 2)
        values: dict[str, Any] = {
            "min_version": 0,
            "max_staleness": 1,
            "group_size": size,
            "min_group_size": size,
            "deadline_s": 60.0,
        }
        ticket = wire.Ticket(
            number=number, domain=domain, task_index=number - 1, seed=number, **{**values, **fields}
        )
        assert await self.bus.publish(TICKETS, ticket, key=domain, ticket=number) == number
        return number

    async def eval_ticket(self, domain: str = "lake", **fields: Any) -> int:
        """Publish an evaluation ticket; its number."""
        self._issued[EVALTICKETS] += 1
        number = self._issued[EVALTICKETS]
        values: dict[str, Any] = {
            "eval_step": 0,
            "policy": "actor",
            "min_version": 0,
            "group_size": 2,
            "temperature": 1.0,
            "deadline_s": 60.0,
        }
        ticket = wire.EvalTicket(
            number=number, domain=domain, task_index=number - 1, seed=number, **{**values, **fields}
        )
        await self.bus.publish(EVALTICKETS, ticket, key=domain, ticket=number)
        return number

    async def raw(self, stream: Stream, data: bytes, domain: str = "lake", ticket: int = 0) -> None:
        """Publish bytes as they are."""
        self._issued[stream] += 1
        headers = {
            MESSAGE_ID: f"raw-{self._issued[stream]}",
            **({wire.TICKET_HEADER: str(ticket)} if ticket else {}),
        }
        await store_message(
            self.bus.link,
            stream.stream_name(self.bus.run),
            stream.subject(self.bus.run, domain),
            data,
            headers,
        )

    async def records(
        self, count: int, stream: Stream = SAMPLES, within_s: float = LONG_S
    ) -> list[Any]:
        """The first messages of a log, once there are so many."""
        found: list[Any] = []
        async with asyncio.timeout(within_s):
            async for record in self.bus.read_log(stream, 1):
                found.append(record.message)
                if len(found) == count:
                    break
        return found

    async def groups(self, count: int, stream: Stream = SAMPLES) -> dict[int, wire.Group]:
        """The first groups of a log by ticket."""
        return {group.ticket: group for group in await self.records(count, stream)}

    async def settled(self, stream: Stream = TICKETS) -> None:
        """Until every ticket is acknowledged."""
        async with asyncio.timeout(LONG_S):
            while sum((await self.bus.depth(stream)).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def options(self, *arguments: str) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--n", type=int, default=None)
        parser.add_argument("--domains", type=lambda text: text.split(","), default=[])
        add_join_options(parser)
        return parser.parse_args(["--broker", self.url, "--run", self.bus.run, *arguments])

    @asynccontextmanager
    async def hub(self, *arguments: str) -> AsyncIterator[Stop]:
        """A hub in this process, drained at the end."""
        stop = Stop()
        task = asyncio.create_task(serve(self.options(*arguments), stop))
        try:
            yield stop
        finally:
            stop.request("the test is over")
            async with asyncio.timeout(LONG_S):
                await task

    def spawn(
        self, *arguments: str, program: Sequence[str] = ("-m", "envhub.cli"), **variables: str
    ) -> subprocess.Popen[str]:
        """A hub in a process of its own; ``variables`` are added to its environment."""
        child = subprocess.Popen(
            [sys.executable, *program, "--broker", self.url, "--run", self.bus.run, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children.append(child)
        return child

    async def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
            assert child.stderr is not None
            child.stderr.close()
        for server in self.servers:
            await server.close()
