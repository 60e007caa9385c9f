"""`rlearner up` where the run is at work already, started by hand on another broker."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import learner_fleet as fleet
import pytest
from waits import LONG_S

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.presence import census
from broker.runtime.process import Stop
from broker.settings.run_address import noted_address
from broker.settings.run_settings import RunSettings
from learner.prepare import to_yaml
from learner.run_folder import note_broker
from learner.service import serve_learner
from rlearner.ops.listing import summarize_run

COMMAND = [sys.executable, "-m", "rlearner.cli"]


async def up(file: Path) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "up", str(file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 2 * LONG_S)
    return process.returncode, out.decode(), err.decode()


async def test_a_run_that_is_live_is_left_alone(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config, folder, working = (
        fleet.config(str(tmp_path), run_name),
        tmp_path / run_name,
        asyncio.Event(),
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        working.set()
        return []  # it goes on until it is told to stop

    stop = Stop()
    async with fleet.Hub(bus, answer), asyncio.timeout(4 * LONG_S):
        learning = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60)
        )
        await working.wait()
        here = next(one for one in await census(bus, run_name) if one.role == "learner")
        left = {
            path: path.read_bytes()
            for path in (folder / "config.yaml", folder / "broker.url", folder / "epoch")
        }
        code, out, err = await up(tmp_path / "run.yaml")
        assert (code, out) == (2, "")
        assert err == (
            f"error: run {run_name} is live at {broker_url} (learner on {here.host}, process {os.getpid()}); "
            f"`rlearner status {folder}` shows it\n"
        )
        assert {path: path.read_bytes() for path in left} == left
        assert [path for path in (".lock", "logs", "broker") if (folder / path).exists()] == []
        assert (await summarize_run(folder)).state == "training"
        stop.request("SIGTERM")
        await learning
    assert (await summarize_run(folder)).state == "stopped"
    code, _, err = await up(tmp_path / "run.yaml")  # it has left, and its streams are still there
    assert code == 2
    assert err == (
        f"error: run {run_name} was last trained with the broker at {broker_url}: "
        f"continue with `rlearner start {folder} --broker {broker_url}` and start the other processes by hand\n"
    )


async def test_a_learner_notes_its_broker_once_it_holds_the_run(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Where it may not have the run it leaves the address; and it does not take another broker's
    run for a lost one.
    """
    folder, other = tmp_path / run_name, "nats://127.0.0.1:9"
    train = {"steps": 2}
    async with (
        fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]),
        asyncio.timeout(4 * LONG_S),
    ):
        await serve_learner(
            RunSettings.of_config(fleet.config(str(tmp_path), run_name, train=train)),
            broker_url,
            Stop(),
            connect_deadline_s=60,
        )
        assert noted_address(folder) == broker_url
        await bus.delete_streams()
        await bus.ensure_streams()
        note_broker(folder, other)
        with pytest.raises(
            UserError, match=r"tickets end at number 0, but 4 were issued"
        ) as refused:
            await serve_learner(
                RunSettings.of_config(fleet.config(str(tmp_path), run_name, train={"steps": 3})),
                broker_url,
                Stop(),
                connect_deadline_s=60,
            )
    assert str(refused.value).endswith(
        f"the run was last trained with the broker at {other}: `rlearner start {folder} --broker {other}` continues "
        f"there; "
        "if that has lost its store, --rebase continues with the open tickets counted dead"
    )
    assert noted_address(folder) == other
