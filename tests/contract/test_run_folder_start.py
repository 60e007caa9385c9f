"""`rlearner start` and `up` on the folder of a run: it remembers its settings, and says how to go
on.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import learner_fleet as fleet
import yaml
from waits import LONG_S

from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.server.private_server import BrokerServer
from broker.settings.run_address import private_addresses
from broker.settings.run_settings import RunSettings
from learner.prepare import to_yaml
from learner.run_folder import STORE, note_broker
from learner.service import serve_learner
from rlearner.up.run_claim import RunClaim


async def start(*arguments: str, command: str = "start") -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rlearner.cli", command, *arguments, stdout=pipe, stderr=pipe
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_a_finished_run_goes_on_with_its_settings(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    folder, file, broker = tmp_path / run_name, tmp_path / "run.yaml", ("--broker", broker_url)
    file.write_text(to_yaml(fleet.config(str(tmp_path), run_name, train={"steps": 2, "lr": 3e-3})))
    async with (
        fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]),
        asyncio.timeout(4 * LONG_S),
    ):
        code, out, err = await start(str(file), *broker)
        assert (code, out) == (
            0,
            f"go on with this run: rlearner start {folder} --broker {broker_url} train.steps=4\n",
        ), err
        code, out, err = await start(str(folder), *broker, "train.steps=4")
    assert (code, out) == (
        0,
        f"go on with this run: rlearner start {folder} --broker {broker_url} train.steps=8\n",
    ), err
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert (
        kept["train"]["steps"],
        kept["train"]["lr"],
        kept["run"]["name"],
        kept["run"]["dir"],
    ) == (
        4,
        3e-3,
        run_name,
        str(tmp_path),
    )
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]


async def test_a_start_that_fails_in_its_setup_leaves_no_folder(
    broker_url: str, run_name: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    file, warm = (
        tmp_path / "run.yaml",
        {"steps": 2, "data": str(tmp_path / "rows.jsonl"), "batch_size": 4},
    )
    file.write_text(to_yaml(fleet.config(str(tmp_path / "runs"), run_name, warm_start=warm)))
    code, out, err = await start(str(file), "--broker", broker_url)
    assert (code, out) == (2, "")
    assert f"error: {tmp_path / 'rows.jsonl'}:1: " in err
    assert not (tmp_path / "runs").exists()


async def test_up_goes_on_with_a_run_that_it_trained_before(tmp_path: Path) -> None:
    """The first life is a learner on a private broker with a made-up fleet, the second a whole
    fleet of processes.
    """
    folder = tmp_path / "mine"
    rollout = {"engine": "random", "engine_args": {"choices": ["L", "R"]}}
    config = fleet.config(str(tmp_path), "mine", train={"steps": 1}, rollout=rollout)
    folder.mkdir()
    with RunClaim(folder, "mine") as claim, BrokerServer(str(folder / STORE)) as server:
        claim.note(server.url)
        bus = await Bus.connect(server.url, "mine", name="test", deadline_s=60)
        await bus.ensure_streams()
        async with (
            fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]),
            asyncio.timeout(4 * LONG_S),
        ):
            await serve_learner(
                RunSettings.of_config(config), server.url, Stop(), connect_deadline_s=60
            )
        await bus.close()
    assert private_addresses(folder) == [server.url]
    async with asyncio.timeout(4 * LONG_S):
        code, out, err = await start(str(folder), "train.steps=2", command="up")
    assert code == 0, out + err + (folder / "logs" / "learner.log").read_text()
    assert f"go on with this run: rlearner up {folder} train.steps=4" in out
    assert [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2]
    assert len(private_addresses(folder)) == 2
    described = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    assert [
        path.name
        for path in folder.iterdir()
        if not re.search(f"`{re.escape(path.name)}[/`]", described)
    ] == []
    note_broker(folder, "nats://127.0.0.1:9")
    code, _, err = await start(str(folder), "train.steps=3", command="up")
    assert code == 2
    assert err.startswith(
        "error: run mine was last trained with the broker at nats://127.0.0.1:9, which does not answer"
    )
