"""A learner that starts beside another one, or is told to leave, while it loads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
from waits import LONG_S, until

import learner.service
from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop, Stopped
from broker.server.private_server import BrokerServer
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import publish_runspec
from learner.checkpoints import checkpoint
from learner.run_watch import EpochWatch
from learner.service import serve_learner
from learner.training_setup import open_training

Meanwhile = Callable[[], Awaitable[None] | None]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Meanwhile], list[str]]:
    """Has something happen while a model is first loaded; the paths that are loaded."""

    def begin(meanwhile: Meanwhile) -> list[str]:
        paths: list[str] = []

        async def loading(
            settings: RunSettings, model_path: str, first_path: str, **more: Any
        ) -> Any:
            made = await open_training(settings, model_path, first_path, **more)
            if not paths and (work := meanwhile()) is not None:
                await work
            paths.append(Path(model_path).name)
            return made

        monkeypatch.setattr(learner.service, "open_training", loading)
        return paths

    return begin


async def train(bus: Bus, url: str, config: dict[str, Any], stop: Stop | None = None) -> None:
    async with (
        fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]),
        asyncio.timeout(240),
    ):
        await serve_learner(
            RunSettings.of_config(config), url, stop or Stop(), connect_deadline_s=60
        )


async def epoch(bus: Bus) -> int:
    found = await bus.key_value(RUNS).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    return found[0].epoch


async def word(bus: Bus) -> str:
    found = await bus.key_value(CONTROL).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.DesiredState)
    return found[0].state


@pytest.mark.parametrize("deleted", [True, False])
async def test_what_another_learner_has_written_meanwhile_is_gone_on_from(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    loaded: Callable[[Meanwhile], list[str]],
    deleted: bool,
) -> None:
    """By the time that a checkpoint is loaded one of step 3 is there, and it may be deleted. No
    line and no step is lost.
    """
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 3}, checkpoint={"every_steps": 1, "keep": 9}
    )
    await train(bus, broker_url, config)
    folder, hidden = tmp_path / run_name / "checkpoints", tmp_path / "step-000003"
    (folder / "step-000003").rename(hidden)
    # of step 2, or of step 1 where that was still being written
    *older, before = checkpoint.list_checkpoints(folder)

    def go_on() -> None:
        hidden.rename(folder / "step-000003")
        if deleted:
            before.rename(tmp_path / "deleted")

    paths = loaded(go_on)
    lines = (tmp_path / run_name / "metrics.jsonl").read_text()
    await train(
        bus,
        broker_url,
        fleet.config(
            str(tmp_path), run_name, train={"steps": 4}, checkpoint={"every_steps": 1, "keep": 9}
        ),
    )
    assert paths == [before.name, "step-000003"]
    kept = older if deleted else [*older, before]
    assert checkpoint.list_checkpoints(folder) == [
        *kept,
        folder / "step-000003",
        folder / "step-000004",
    ]
    after = (tmp_path / run_name / "metrics.jsonl").read_text()
    assert after.startswith(lines)
    assert [json.loads(line)["step"] for line in after.splitlines()] == [1, 2, 3, 4]
    assert await epoch(bus) == 2


async def test_told_to_leave_while_it_loads_it_leaves_the_run_to_who_has_it(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    loaded: Callable[[Meanwhile], list[str]],
) -> None:
    await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    written = (tmp_path / run_name / "config.yaml").read_bytes()
    stop = Stop()
    loaded(lambda: stop.request("SIGTERM"))
    with pytest.raises(Stopped, match="SIGTERM"):
        await train(
            bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 2}), stop
        )
    assert await epoch(bus) == 1
    assert (tmp_path / run_name / "config.yaml").read_bytes() == written


async def test_a_run_that_is_stopped_while_its_learner_loads_stays_stopped(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    loaded: Callable[[Meanwhile], list[str]],
) -> None:
    """It was stopped before, too: that word is older than the learner, which goes on in spite of
    it.
    """
    await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    assert await word(bus) == "stopped"

    async def stop() -> None:
        await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="stopped"))

    loaded(stop)
    with pytest.raises(Stopped, match="the run is stopped"):
        await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 2}))
    assert (await word(bus), await epoch(bus)) == ("stopped", 1)


async def test_asked_to_stop_while_there_is_no_broker_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a last checkpoint, for it cannot know whether the run is still its own; the one
    before stays.
    """
    monkeypatch.setattr("learner.checkpoints.saver.PARTING_S", 0.5)
    server = BrokerServer(str(tmp_path / "store"))
    server.start()
    bus = await Bus.connect(server.url, "alone", name="test", deadline_s=60)
    await bus.ensure_streams()
    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number < 5:
            return [fleet.group(ticket, ticket.min_version)]
        server.stop()
        stop.request("SIGINT")
        return []

    hub = fleet.Hub(bus, answer)
    try:
        async with hub, asyncio.timeout(LONG_S):
            await serve_learner(
                RunSettings.of_config(fleet.config(str(tmp_path), "alone", train={"steps": 50})),
                server.url,
                stop,
                connect_deadline_s=60,
            )
    finally:
        server.stop()
        await bus.close()
    assert checkpoint.list_checkpoints(tmp_path / "alone" / "checkpoints") == []


async def test_a_learner_that_finds_out_by_writing_a_checkpoint_says_who_has_the_run(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint may ask the broker before the news of the other one has come by itself."""

    async def never(_: EpochWatch) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(EpochWatch, "_follow_epoch", never)
    training = asyncio.create_task(
        train(
            bus,
            broker_url,
            fleet.config(
                str(tmp_path), run_name, train={"steps": 1000}, checkpoint={"every_steps": 1}
            ),
        )
    )
    await until(lambda: checkpoint.list_checkpoints(tmp_path / run_name / "checkpoints"))
    await publish_runspec(
        bus,
        wire.RunSpec(
            run=run_name, wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path=""
        ),
    )
    with pytest.raises(
        UserError, match="a newer learner took over under epoch 2, this one is epoch 1"
    ):
        await training


async def test_a_paused_run_stays_paused_when_its_learner_is_started_again(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A supervisor starts a learner that died again; only ``resume`` lifts what the operator said.
    Hubs follow the word that is kept.
    """
    await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    control = bus.key_value(CONTROL)
    await control.put(bus.run, wire.DesiredState(state="paused"))
    training = asyncio.create_task(
        train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 2}))
    )
    await until(
        lambda: (
            f"run {run_name} is paused and stays so; continue it with `rlearner resume {run_name}`"
            in caplog.text
        )
    )
    assert (await word(bus), await epoch(bus)) == ("paused", 2)
    await training  # the made-up hub follows no word


async def test_a_damaged_checkpoint_is_named_and_the_one_before_continues(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The digests are those of the bytes written; the samples after the checkpoint before are still
    in the log.
    """
    settings = {"checkpoint": {"every_steps": 1}}
    await train(
        bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 3}, **settings)
    )
    folder = tmp_path / run_name / "checkpoints"
    before, newest = checkpoint.list_checkpoints(folder)
    part = newest / "learner" / "part-00001-of-00001.safetensors"
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    await train(
        bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 4}, **settings)
    )
    line = f"{part} is damaged: its digest is not that of the bytes written; the run resumes from {before}"
    assert [one.levelname for one in caplog.records if line in one.getMessage()] == ["WARNING"]
    assert checkpoint.list_checkpoints(folder)[-1].name == "step-000004"
    # what was there is kept, for the user to look at
    assert (folder / "damaged-step-000003").is_dir()


async def test_the_only_checkpoint_is_damaged(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    (newest,) = checkpoint.list_checkpoints(tmp_path / run_name / "checkpoints")
    part = newest / "learner" / "part-00001-of-00001.safetensors"
    part.unlink()
    with pytest.raises(UserError, match=rf"^{part} cannot be read: No such file"):
        await train(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 2}))
    assert await epoch(bus) == 1
