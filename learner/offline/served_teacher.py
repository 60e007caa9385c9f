"""Scores rows with a teacher on rollout servers, which join a run whose only policy is the teacher.

    broker serve
    rlearner distill configs/distill.yaml distill.served=true distill.top_k=16 run.name=taught
    rollout-server --run taught

Servers join and leave as in any run; a row that one did not score is sent to another. Training ends
with the run.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from broker.channel import carriers
from broker.contract import wire
from broker.contract.checks import MAX_REQUEST_S
from broker.contract.streams import CONTROL
from broker.errors import RequestFailed, UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.runtime.presence import Roster
from broker.settings.runspec import publish_runspec
from broker.system.process_identity import this_process
from broker.system.reminders import Reminders
from learner.algorithm.samples import Array
from learner.offline.base import OfflineJob
from learner.offline.config import DistillSection, DistillSettings

log = logging.getLogger(__name__)

POLICY: Final = "teacher"
MAX_REFUSALS: Final = 3  # of one row
# A server that did not respond is avoided; if it is dead, presence reports it within this time.
AVOID_S: Final = 6.0
CONNECT_S: Final = 20.0
# An unreachable broker must not keep a finished training from ending.
STOP_TIMEOUT_S: Final = 5.0

T = TypeVar("T")
# The top ids, int32, and their logprobs, float32, (n - 1, k) each.
Answer = tuple[Array, Array]


class ServedTeacher:
    """Client of a served teacher, with its own thread: training code need not be asynchronous.

    Raises:
        UserError: if there is no broker at the address.
    """

    def __init__(self, job: OfflineJob[DistillSettings]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="teacher", daemon=True)
        self._thread.start()
        self._client: _TeacherClient | None = None
        try:
            self._client = self._wait(_open_client(job))
        except BaseException:
            self.close()
            raise

    def ask(self, rows: Sequence[Array]) -> list[Answer]:
        """Return the teacher's best candidates for every token but the first of each row.

        Raises:
            UserError: if servers refuse a row.
        """
        assert self._client is not None
        return self._wait(self._client.ask(rows))

    def close(self) -> None:
        """Stop the run, so that its servers exit; idempotent."""
        if not self._thread.is_alive():
            return
        if self._client is not None:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _absolute_path(path: str) -> str:
    """Return an absolute path for servers in other folders, or a hub name unchanged."""
    local = Path(path).expanduser()
    return str(local.absolute()) if local.is_dir() else path


async def _open_client(job: OfflineJob[DistillSettings]) -> _TeacherClient:
    settings = job.settings
    run = str(settings.run.name)
    path = _absolute_path(settings.distill.teacher)
    bus = await Bus.connect(job.url, run, name="distill", deadline_s=CONNECT_S)
    await bus.ensure_streams()
    rollout = settings.rollout.model_copy(update={"policy": POLICY, "model_path": path})
    config = {
        "rollout": rollout.to_plain(),
        "broker": settings.broker.to_plain(),
        "model": settings.model.to_plain(),
    }
    spec = wire.RunSpec(
        run=run, wire_version=wire.WIRE_VERSION, epoch=0, config=config, model_path=path
    )
    await publish_runspec(bus, spec)
    await bus.key_value(CONTROL).put(run, wire.DesiredState(state="running"))
    roster = Roster(bus, beats=("rollout",))
    await roster.start()
    client = _TeacherClient(bus, roster, settings.distill, settings.broker.channel)
    await client.announcer.start()
    return client


class _TeacherClient:
    """Asynchronous part of ``ServedTeacher``."""

    def __init__(self, bus: Bus, roster: Roster, distill: DistillSection, carrier: str) -> None:
        self._bus = bus
        self._roster = roster
        self._distill = distill
        self._client = carriers.make_client(carrier, bus)
        # Servers on other hosts admit the key of a presence only.
        self.announcer = Announcer(bus, self._presence)
        self._client.announce = self.announcer.poke
        self._numbers = itertools.count(1)
        self._in_flight: dict[str, int] = {}  # server -> rows in flight
        self._avoid: dict[str, float] = {}  # server -> until when, on the monotonic clock
        self._waiting = Reminders()
        self._capacity = asyncio.Semaphore(distill.concurrency)

    async def ask(self, rows: Sequence[Array]) -> list[Answer]:
        """Score all rows, ``distill.concurrency`` at once; the first failure cancels the others."""
        tasks = [asyncio.ensure_future(self._score_row(row)) for row in rows]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Stop the run and disconnect, without waiting for an unreachable broker."""
        run = self._bus.run
        end = wire.DesiredState(state="stopped", reason="training is done")
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._bus.key_value(CONTROL).put(run, end)
        except TimeoutError:
            log.warning(
                "the broker at %s does not respond, so the servers of run %s are not stopped",
                self._bus.link.where,
                run,
            )
        await self.announcer.close()
        await self._client.close()
        await self._roster.close()
        await self._bus.close()

    def _presence(self) -> wire.Presence:
        return wire.Presence(
            role="learner",
            id="distill",
            host=socket.gethostname(),
            pid=os.getpid(),
            state="serving",
            process=this_process(),
            key=self._client.key,
        )

    async def _score_row(self, token_ids: Array) -> Answer:
        refusals: list[str] = []
        async with self._capacity:
            while len(refusals) < MAX_REFUSALS:
                server = await self._choose_server()
                try:
                    reply = await self._request(server, token_ids)
                    if reply.top_ids is None and reply.finish_reason != "error":
                        raise RequestFailed(reply.error or f"{reply.finish_reason}: it is leaving")
                # Not a refusal: another server will score the row.
                except RequestFailed as error:
                    log.info("trying another server: %s: %s", server.id, error)
                    self._avoid[server.id] = time.monotonic() + AVOID_S
                    continue
                try:
                    return self._parse_reply(reply, len(token_ids))
                except RequestFailed as error:
                    refusals.append(str(error))
        raise UserError(
            f"distill.teacher: a row of {len(token_ids)} tokens was refused {len(refusals)} times, "
            f"last by {refusals[-1]}"
        )

    async def _choose_server(self) -> wire.Presence:
        """Return the teacher's server with the fewest rows in flight; wait until there is one."""
        while True:
            now = time.monotonic()
            alive = self._roster.alive("rollout")
            serving = [
                server
                for server in alive
                if server.policy == POLICY and server.state == "serving" and server.address
            ]
            if usable := [server for server in serving if self._avoid.get(server.id, now) <= now]:
                self._waiting.over()
                return min(
                    usable, key=lambda server: (self._in_flight.get(server.id, 0), server.id)
                )
            if self._waiting.due(now):
                log.info(
                    "waiting for a rollout-server to join run %s and serve the teacher",
                    self._bus.run,
                )
            await self._roster.changed(1.0)

    async def _request(self, server: wire.Presence, token_ids: Array) -> wire.GenerateReply:
        number = next(self._numbers)
        request = wire.GenerateRequest(
            request_id=f"distill.{number}",
            conversation_id=f"distill.{number}",
            token_ids=wire.column(token_ids, "<i4"),
            sampling=wire.SamplingParams(max_tokens=1),
            deadline_s=min(self._distill.timeout_s, MAX_REQUEST_S),
            prompt_top_k=self._distill.top_k,
        )
        self._in_flight[server.id] = self._in_flight.get(server.id, 0) + 1
        try:
            return await self._client.generate(
                server.address, request, timeout_s=self._distill.timeout_s
            )
        finally:
            self._in_flight[server.id] -= 1

    def _parse_reply(self, reply: wire.GenerateReply, num_tokens: int) -> Answer:
        """Return the candidates and their logprobs, (n - 1, k) each.

        Raises:
            RequestFailed: if the server returned something else.
        """
        shape = (num_tokens - 1, self._distill.top_k)
        if reply.top_ids is None or reply.top_logprobs is None:
            raise RequestFailed(f"{reply.server}: {reply.error or reply.finish_reason}")
        ids = np.array(reply.top_ids.array())
        logprobs = np.array(reply.top_logprobs.array())
        if ids.size != shape[0] * shape[1]:
            raise RequestFailed(
                f"{reply.server}: returned {ids.size} candidates, expected {shape[0] * shape[1]}"
            )
        return ids.reshape(shape), logprobs.reshape(shape)
