"""A checkpoint and an evaluation at the operator's request, from a real learner over a real
nats-server.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
from test_operator import command
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.permissions import permissions
from broker.contract.streams import REQUESTS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.checkpoints.checkpoint import list_checkpoints, read_checkpoint
from learner.service import serve_learner
from rlearner.ops.learner_requests import ask_learner, follow_action


class HeldHub(fleet.Hub):
    """Answers as many tickets as it is allowed to."""

    def __init__(self, bus: Bus) -> None:
        super().__init__(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)])
        self.allowed = asyncio.Semaphore(0)

    async def store(self, delivery: Any, one: wire.Message | bytes) -> None:
        await self.allowed.acquire()
        await super().store(delivery, one)

    def allow(self, groups: int) -> None:
        for _ in range(groups):
            self.allowed.release()


def settings(folder: Path, run: str, **sections: dict[str, Any]) -> dict[str, Any]:
    train = {"steps": 4, "groups_per_step": 2, "max_staleness": 0}
    return fleet.config(str(folder), run, train=train, checkpoint={"every_steps": 0}, **sections)


@asynccontextmanager
async def learner(bus: Bus, url: str, config: dict[str, Any]) -> AsyncIterator[HeldHub]:
    stop = Stop()
    async with HeldHub(bus) as hub:
        work = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), url, stop, connect_deadline_s=60)
        )
        try:
            yield hub
        finally:
            stop.request("test")
            async with asyncio.timeout(LONG_S):
                await work


def steps_on_disk(folder: Path) -> list[int]:
    return [read_checkpoint(path).step for path in list_checkpoints(folder / "checkpoints")]


def lines(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def first_reply(bus: Bus, action: Any) -> wire.OperatorReply:
    """The first answer, of a learner that is still starting."""
    async with asyncio.timeout(LONG_S):
        while True:
            try:
                return await ask_learner(bus, action)
            except UserError:
                await asyncio.sleep(0.2)


async def half_a_step(bus: Bus, version: int) -> bool:
    """Whether the learner has trained on one group of the step after this version."""
    learners = [one for one in await census(bus, bus.run) if one.role == "learner"]
    return [(one.policy_version, one.running) for one in learners] == [(version, 1)]


async def is_done(bus: Bus, step: int) -> bool:
    return (await ask_learner(bus, "checkpoint", step)).state == "done"


async def test_checkpoint_between_two_steps_and_at_the_end_of_one(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, run_name)
    folder = tmp_path / run_name
    async with learner(bus, broker_url, config) as hub:
        hub.allow(2)
        await until(lambda: len(lines(folder)) == 1)
        # nothing of step 2 was trained on: the state is that after step 1, without waiting for a
        # group
        first = await first_reply(bus, "checkpoint")
        assert (first.state, first.step) == ("waiting", 1)
        await until(lambda: steps_on_disk(folder) == [1])
        again = await ask_learner(bus, "checkpoint")
        assert (again.state, again.step) == ("done", 1)
        assert (await ask_learner(bus, "checkpoint", 1)).state == "done"
        # one of the two groups of step 3 was trained on: the checkpoint must wait for the end of
        # the step
        hub.allow(3)
        await until(lambda: half_a_step(bus, version=2))
        reply = await ask_learner(bus, "checkpoint")
        assert (reply.state, reply.step, reply.detail) == (
            "waiting",
            3,
            "it is taken when step 3 ends",
        )
        assert (await ask_learner(bus, "checkpoint")) == reply
        await asyncio.sleep(0.5)
        assert steps_on_disk(folder) == [1]
        hub.allow(1)
        await until(lambda: is_done(bus, 3))
        assert steps_on_disk(folder) == [1, 3]
    assert [line["step"] for line in lines(folder)] == [1, 2, 3]


async def test_command_waits_for_the_checkpoint_that_a_stop_need_not_write_again(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, run_name)
    folder = tmp_path / run_name
    async with learner(bus, broker_url, config) as hub:
        hub.allow(2)
        await until(lambda: len(lines(folder)) == 1)
        code, out, err = await command(
            "checkpoint-now", run_name, "--dir", str(tmp_path), "--timeout", "60"
        )
        assert code == 0, err
        assert out.splitlines()[-1] == "checkpoint of step 1: done, step 1 is on disk"
        asked = read_checkpoint(list_checkpoints(folder / "checkpoints")[-1])
    assert (asked.step, asked.ledger["version"]) == (1, 1)
    assert steps_on_disk(folder) == [1]  # the stop had nothing to add
    code, out, err = await command("audit", run_name, "--dir", str(tmp_path), "--json")
    assert (code, json.loads(out)["lost"]) == (0, 0), err


async def test_evaluation_is_begun_once_and_enters_the_metrics(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, run_name, eval={"every_steps": 0, "tasks": 4})
    folder = tmp_path / run_name
    async with learner(bus, broker_url, config) as hub:
        hub.allow(2)
        await until(lambda: len(lines(folder)) == 1)
        await first_reply(bus, "evaluate")
        async with aclosing(follow_action(bus, "evaluate")) as replies, asyncio.timeout(LONG_S):
            last = [reply async for reply in replies][-1]
        assert (last.state, last.step) == ("done", 1)
        assert last.detail == "success rate 0.5000 on 4 episodes"
        assert [ticket.eval_step for ticket in hub.eval_tickets] == [1] * 4
        hub.allow(2)
        await until(lambda: len(lines(folder)) == 2)
        assert lines(folder)[1]["eval/success_rate"] == 0.5
        assert lines(folder)[1]["eval/step"] == 1
        with pytest.raises(UserError, match="no evaluation after step 7 is running"):
            await ask_learner(bus, "evaluate", 7)


async def test_refusals_are_one_line(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = settings(tmp_path, run_name)
    async with learner(bus, broker_url, config):
        await first_reply(bus, "checkpoint")
        with pytest.raises(UserError, match=r"this run has no held-out tasks: set eval\.tasks"):
            await ask_learner(bus, "evaluate")
    code, out, err = await command("checkpoint-now", run_name, "--dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: run {run_name} did not answer, no learner is running: ")
    assert err.count("\n") == 1


def test_only_the_operator_may_ask() -> None:
    subject = REQUESTS.subject("demo", "learner")
    for role in ("learner", "rollout", "envhub", "rewardhub"):
        allowed = permissions(role, "demo").publish
        assert not [
            one for one in allowed if one.startswith(("rl.demo.requests", "rl.demo.>", ">"))
        ], role
    assert REQUESTS.all_subjects("demo") in permissions("learner", "demo").subscribe
    assert REQUESTS.all_subjects("demo") not in permissions("envhub", "demo").subscribe
    assert subject == "rl.demo.requests.learner"
