"""A second learner of a run: refused while the first is alive, unless told to take over; a dead one
is not waited for.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import MEMBERS
from broker.errors import Fenced, UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.settings.runspec import newest_epoch, publish_runspec
from broker.system.process_identity import this_process
from learner import rival_learners
from learner.prepare import to_yaml
from learner.rival_learners import RivalDetector
from learner.run_folder import note_epoch
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
ELSEWHERE = "another-boot/pid:[1]/7/8"


class Learner:
    """``rlearner start`` in a process of its own."""

    def __init__(self, file: Path, url: str, *options: str, job: str = "") -> None:
        self.job = job
        self.log = file.with_name(f"{os.urandom(4).hex()}.log")
        command = [
            sys.executable,
            "-m",
            "rlearner.cli",
            "start",
            str(file),
            "--broker",
            url,
            *options,
        ]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=ENV | {"SLURM_JOB_ID": job}
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, 2 * LONG_S)
        return self.process.wait()

    def refusal(self, holder: Learner, run: str) -> str:
        job = f" (Slurm job {holder.job})" if holder.job else ""
        return (
            f"error: run {run} is being trained by a learner on {socket.gethostname()}, process {holder.process.pid}"
            f"{job}; --take-over takes it over"
        )


@pytest.fixture
async def start(broker_url: str) -> AsyncIterator[Callable[..., Learner]]:
    """Starts learners, and kills what is left of them."""
    started: list[Learner] = []

    def begin(file: Path, *options: str, job: str = "") -> Learner:
        started.append(Learner(file, broker_url, *options, job=job))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


def write(folder: Path, run: str, **sections: dict[str, Any]) -> Path:
    file = folder / f"{run}.yaml"
    file.write_text(to_yaml(fleet.config(str(folder), run, **sections)))
    return file


def steps(folder: Path) -> int:
    lines = folder / "metrics.jsonl"
    return len(lines.read_text().splitlines()) if lines.exists() else 0


async def test_a_second_learner_is_refused_until_it_is_told_to_take_over(
    bus: Bus, run_name: str, tmp_path: Path, start: Callable[..., Learner]
) -> None:
    """And a third begins where the second was killed, without a flag."""
    file, folder = (
        write(tmp_path, run_name, train={"steps": 1000}, checkpoint={"every_steps": 1}),
        tmp_path / run_name,
    )
    async with fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)], work_s=0.1):
        first = start(file, job="4711")
        await until(lambda: steps(folder) >= 2, 2 * LONG_S)
        (folder / "broker.url").write_text("nats://untouched:1\n")
        refused = start(file, job="4712")
        assert await refused.ended() == 2
        assert refused.said.splitlines()[-1] == refused.refusal(first, run_name)
        assert "Traceback" not in refused.said
        assert (folder / "broker.url").read_text() == "nats://untouched:1\n"
        before = steps(folder)
        await until(lambda: steps(folder) > before)
        assert (await newest_epoch(bus, run_name), first.process.poll()) == (1, None)

        second = start(file, "--take-over")
        assert await first.ended() == 2, first.said
        assert "a newer learner took over under epoch 2" in first.said
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        third = start(file)
        await until(lambda: " training\n" in third.said, 2 * LONG_S)
        assert await newest_epoch(bus, run_name) == 3
        third.process.send_signal(signal.SIGTERM)
        assert await third.ended() == 130, third.said


async def test_a_second_learner_is_refused_while_the_first_makes_its_first_weights(
    bus: Bus, run_name: str, tmp_path: Path, start: Callable[..., Learner]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "U"}]}
        )
        + "\n"
    )
    warm = {"steps": 100_000, "data": str(tmp_path / "rows.jsonl"), "batch_size": 1}
    file = write(tmp_path, run_name, warm_start=warm)
    first = start(file)
    await until(lambda: "warm start" in first.said, 2 * LONG_S)
    refused = start(file)
    assert await refused.ended() == 2
    assert refused.said.splitlines()[-1] == refused.refusal(first, run_name)
    assert first.process.poll() is None


async def test_of_two_that_start_at_once_one_trains_and_the_other_is_refused(
    bus: Bus, run_name: str, tmp_path: Path, start: Callable[..., Learner]
) -> None:
    model = build_tiny(tmp_path / "model", TinyModel.model_validate(fleet.TINY))
    file, folder = (
        write(tmp_path, run_name, train={"steps": 1000}, model={"path": str(model)}),
        tmp_path / run_name,
    )
    folder.mkdir()
    # so that they share nothing that is made at a first start
    shutil.copy(file, folder / "config.yaml")
    async with fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)], work_s=0.1):
        both = [start(file), start(file)]
        await until(lambda: any(one.process.poll() is not None for one in both), 2 * LONG_S)
        (loser,) = (one for one in both if one.process.poll() is not None)
        (winner,) = (one for one in both if one is not loser)
        assert loser.process.poll() == 2
        assert loser.said.splitlines()[-1] == loser.refusal(winner, run_name)
        await until(lambda: steps(folder) >= 1, 2 * LONG_S)
        assert await newest_epoch(bus, run_name) == 1


# -------------------------------------------------------------------------------------------------------
# holders


def presence(process: str, epoch: int = 1) -> wire.Presence:
    return wire.Presence(
        role="learner",
        id="learner",
        host="node-9",
        pid=7,
        state="serving",
        epoch=epoch,
        process=process,
    )


@asynccontextmanager
async def listening(bus: Bus, folder: Path) -> AsyncIterator[RivalDetector]:
    made = RivalDetector(bus, folder)
    await made.start()
    yield made
    await made.close()


async def take_epoch(bus: Bus) -> int:
    return await publish_runspec(
        bus,
        wire.RunSpec(
            run=bus.run, wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path=""
        ),
    )


@pytest.fixture
def no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for a beat never ends by itself."""
    monkeypatch.setattr(rival_learners, "SILENT_AFTER_S", 1e9)


@pytest.mark.usefixtures("no_end")
async def test_nothing_is_waited_for_where_the_holder_has_ended_or_there_is_none(
    bus: Bus, tmp_path: Path
) -> None:
    machine, pid, started = this_process().rsplit("/", 2)
    gone = f"{machine}/{pid}/{int(started) + 1}"
    async with asyncio.timeout(LONG_S), listening(bus, tmp_path) as first:
        assert await first.refuse() == 0
    epoch = await take_epoch(bus)
    note_epoch(tmp_path, epoch, gone)
    await bus.key_value(MEMBERS).put(f"{bus.run}.learner.learner", presence(gone))
    async with asyncio.timeout(LONG_S), listening(bus, tmp_path) as second:
        assert await second.refuse() == 1


async def test_a_holder_elsewhere_is_waited_for_and_refused_when_it_beats(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry alone says little: it may have died a moment ago. After one presence TTL without a
    beat the run is free.
    """
    note_epoch(tmp_path, await take_epoch(bus), ELSEWHERE)
    async with listening(bus, tmp_path) as silent:
        began = asyncio.get_running_loop().time()
        assert await silent.refuse() == 1
        assert asyncio.get_running_loop().time() - began > rival_learners.SILENT_AFTER_S - 1.0
    monkeypatch.setattr(rival_learners, "SILENT_AFTER_S", 1e9)
    async with listening(bus, tmp_path) as patient:
        refusing = asyncio.create_task(patient.refuse())
        announcer = Announcer(bus, lambda: presence(ELSEWHERE))
        await announcer.start()
        with pytest.raises(
            UserError,
            match=r"is being trained by a learner on node-9, process 7; --take-over takes it over",
        ):
            await asyncio.wait_for(refusing, LONG_S)
        await announcer.close()


@pytest.mark.usefixtures("no_end")
async def test_whoever_takes_the_epoch_first_refuses_the_other_that_started_with_it(
    bus: Bus, tmp_path: Path
) -> None:
    epoch = [0]
    async with listening(bus, tmp_path) as mine:
        assert await mine.refuse() == 0
        announcer = Announcer(bus, lambda: presence(ELSEWHERE, epoch[0]))
        await announcer.start()
        await until(lambda: bool(mine._beats))
        assert await mine.refuse() == 0  # it is starting, too
        epoch[0] = await take_epoch(bus)
        with pytest.raises(Fenced, match="another learner took epoch 1"):
            await publish_runspec(
                bus,
                wire.RunSpec(run=bus.run, wire_version=8, epoch=0, config={}, model_path=""),
                known_epoch=0,
            )
        announcer.poke()
        with pytest.raises(UserError, match="process 7"):
            await asyncio.wait_for(mine.refuse(), LONG_S)
        await announcer.close()
    assert await newest_epoch(bus, bus.run) == 1


TRACKER = """class Refuses:
    def __init__(self, folder, run, project, config, args):
        raise ValueError("no such account")
"""


async def test_a_takeover_that_cannot_start_leaves_the_run_to_the_first(
    bus: Bus, run_name: str, tmp_path: Path, start: Callable[..., Learner]
) -> None:
    """Whatever it is that fails: settings of its own, data that is not there, a tracker that
    refuses.
    """
    (tmp_path / "tracker.py").write_text(TRACKER)
    train = {"steps": 1000}
    file, folder = write(tmp_path, run_name, train=train, trackers={"use": []}), tmp_path / run_name
    async with fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)], work_s=0.1):
        first = start(file)
        await until(lambda: steps(folder) >= 1, 2 * LONG_S)
        written = (folder / "config.yaml").read_bytes()
        for setting, code, said in (
            (f"trackers.use=[{tmp_path / 'tracker.py'}:Refuses]", 1, "no such account"),
            ("warm_start={steps: 3, data: missing.jsonl}", 2, "missing.jsonl"),
        ):
            second = start(file, setting, "--take-over")
            assert await second.ended() == code, second.said
            assert said in second.said
        before = steps(folder)
        await until(lambda: steps(folder) > before)
        assert (await newest_epoch(bus, run_name), first.process.poll()) == (1, None)
        assert (folder / "config.yaml").read_bytes() == written
