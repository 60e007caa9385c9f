"""The broker loses its store between two lives of the learner: a real nats-server whose folder, or
one of whose streams, is deleted.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest

from bench.support.fleet import free_port
from broker.contract import wire
from broker.contract.streams import RUNS, SAMPLES, TICKETS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.jetstream.provision import delete_stream
from broker.runtime.process import Stop
from broker.server.private_server import BrokerServer
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.credit import ledger_segments
from learner.service import serve_learner
from rlearner.cli import main

RUN = "rebased"
STEPS = 6


class Broker:
    """A nats-server of its own, on one port and one store."""

    def __init__(self, folder: Path) -> None:
        self.store, self.port = folder / "broker", free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.server = BrokerServer(str(self.store), port=self.port)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def stop(self) -> None:
        await asyncio.to_thread(self.server.stop)

    async def lose_everything(self) -> None:
        await self.stop()
        shutil.rmtree(self.store)
        self.server = BrokerServer(str(self.store), port=self.port)
        await self.start()

    async def lose(self, *streams: Any) -> None:
        async with self.bus() as bus:
            for stream in streams:
                await delete_stream(bus.link, stream.stream_name(RUN))

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.url, RUN, name="test", deadline_s=60)
        try:
            yield bus
        finally:
            await bus.close()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    made = Broker(tmp_path)
    await made.start()
    yield made
    await made.stop()


def settings(tmp_path: Path, *, keep: bool) -> dict[str, Any]:
    train = {"steps": STEPS, "max_staleness": 1, "on_late": "wait"}
    return fleet.config(
        str(tmp_path), RUN, train=train, checkpoint={"every_steps": 2}, samples={"keep": keep}
    )


class Stragglers:
    """Tickets 3 and 4 are due before 5 and 6, but answered after them; from 7 on nothing is.

    So checkpoint 2 stands behind record 6, at ticket 8, and holds the groups of 5 and 6. Step 3 is
    made of them without another record, and grants 9 and 10: the learner dies there.
    """

    def __init__(self) -> None:
        self.held: list[wire.Ticket] = []
        self.granted = False

    def __call__(self, ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number in (3, 4):
            self.held.append(ticket)
            return []
        if ticket.number == 10:
            self.granted = True
        own = [fleet.group(ticket, ticket.min_version)] if ticket.number < 7 else []
        return (
            [*own, *(fleet.group(one, 0) for one in self.held)] if ticket.number == 6 else list(own)
        )


async def die_when(life: asyncio.Task[None], what: Callable[[], bool]) -> None:
    """End the learner, without a last checkpoint, as soon as it holds."""
    while not what():
        await asyncio.wait({life}, timeout=0.05)
        if life.done():
            life.result()
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)


async def first_life(broker: Broker, config: dict[str, Any]) -> None:
    """Up to ticket 10, with nothing on disk but checkpoint 2."""
    folder, every = Path(config["run"]["dir"]) / RUN, config["checkpoint"]["every_steps"]
    answer = Stragglers()
    async with broker.bus() as bus, asyncio.timeout(120):
        await bus.ensure_streams()
        async with fleet.Hub(bus, answer):
            life = asyncio.create_task(
                serve_learner(
                    RunSettings.of_config(config), broker.url, Stop(), connect_deadline_s=60
                )
            )
            await die_when(
                life,
                lambda: (
                    answer.granted
                    and bool(checkpoint.list_checkpoints(folder / "checkpoints") or every > STEPS)
                ),
            )
    if every > STEPS:
        return
    found = checkpoint.newest_checkpoint(folder / "checkpoints")
    assert found is not None
    state = found.ledger
    assert (
        found.step,
        state["position"],
        state["issued"],
        [one["number"] for one in state["taken"]],
    ) == (
        2,
        7,
        8,
        [5, 6],
    )


async def last_life(broker: Broker, config: dict[str, Any], *, rebase: bool) -> list[int]:
    """To the end, with a fleet that answers everything; the numbers of its tickets."""
    async with broker.bus() as bus, asyncio.timeout(120):
        await bus.ensure_streams()
        async with fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]) as hub:
            await serve_learner(
                RunSettings.of_config(config),
                broker.url,
                Stop(),
                connect_deadline_s=60,
                rebase=rebase,
            )
    return [ticket.number for ticket in hub.tickets]


def ticket(number: int, version: int) -> wire.Ticket:
    """As the learner issues it where nothing has been replaced."""
    fields = {
        "number": number,
        "domain": "lake",
        "task_index": number - 1,
        "seed": 0,
        "min_version": version,
        "max_staleness": 1,
    }
    return wire.Ticket(**fields, group_size=2, min_group_size=2, deadline_s=20.0)  # type: ignore[arg-type]


def tickets(folder: Path) -> tuple[int, ...]:
    line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    numbers = [
        line[f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    ]
    assert numbers[0] == sum(numbers[1:])
    assert line["step"] == STEPS
    return tuple(numbers)


async def audited(
    broker: Broker, folder: Path, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    arguments = [
        "audit",
        RUN,
        "--dir",
        str(folder.parent),
        "--json",
        "--broker",
        broker.url,
        "--connect-deadline",
        "10",
    ]
    capsys.readouterr()
    code = await asyncio.to_thread(_in_its_own_loop, arguments)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    return report


def _in_its_own_loop(arguments: list[str]) -> int:
    from rlearner.cli import _parse_arguments
    from rlearner.ops.auditing import audit_run

    return asyncio.run(audit_run(_parse_arguments(arguments)))


@pytest.mark.parametrize("keep", [False, True], ids=["log-only", "with-archive"])
async def test_the_whole_store_is_lost(
    broker: Broker,
    tmp_path: Path,
    keep: bool,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, folder = settings(tmp_path, keep=keep), tmp_path / RUN
    await first_life(broker, config)
    await broker.lose_everything()
    with pytest.raises(UserError) as refused:
        await last_life(broker, config, rebase=False)
    assert str(refused.value) == (
        "the broker's tickets end at number 0, but 8 were issued; samples end at record 0, but 7 were consumed; "
        "it lost its store; `rlearner start … --rebase` continues with the open tickets counted dead"
    )
    numbers = await last_life(broker, config, rebase=True)
    # 9 and 10 were granted behind the checkpoint, 7 and 8 were open; without an archive the groups
    # of 5 and 6 are gone, too
    dead = 4 if keep else 6
    assert numbers == list(range(11, 11 + 12 - 4 - (2 if keep else 0)))
    assert f"rebased: {dead} tickets counted dead, the next one is 11" in caplog.text
    assert tickets(folder) == (12 + dead, 12, 0, 0, dead, 0)
    async with broker.bus() as bus:
        assert await bus.last_seq(TICKETS) == 12 + dead
        found = await bus.key_value(RUNS).get(RUN)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    assert found[0].epoch == 2  # although the broker had forgotten the first
    report = await audited(broker, folder, capsys)
    assert report["problems"] == []
    counted = {
        name: report[name]
        for name in ("tickets", "trained", "dead", "open", "lost", "trained_twice")
    }
    assert counted == {
        "tickets": 12 + dead,
        "trained": 12,
        "dead": dead,
        "open": 0,
        "lost": 0,
        "trained_twice": 0,
    }
    names = "7-10" if keep else "5-10"
    assert (
        f"rebase: the broker had lost its store; tickets {names} were counted dead"
        in report["notes"]
    )
    if keep:  # the archive goes on behind what was lost, and tells the whole story
        code = await asyncio.to_thread(_replay, folder)
        assert code == 0, capsys.readouterr().out
        assert capsys.readouterr().out.splitlines()[-1].startswith("identical: 6 steps")


def _replay(folder: Path) -> int:
    from rlearner.cli import _parse_arguments
    from rlearner.ops.replaying import replay_run

    return asyncio.run(
        replay_run(
            _parse_arguments(
                ["replay", RUN, "--dir", str(folder.parent), "--from", "0", "--to", str(STEPS)]
            )
        )
    )


async def test_only_the_tickets_are_lost(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the log still holds is trained; only tickets without a record are dead."""
    config = settings(tmp_path, keep=False)
    await first_life(broker, config)
    async with broker.bus() as bus:  # a straggler that the learner never saw
        await bus.publish(SAMPLES, fleet.group(ticket(7, 2), 2), ticket=7)
    await broker.lose(TICKETS)
    with pytest.raises(
        UserError,
        match=r"the broker's tickets end at number 0, but 8 were issued; it lost its store",
    ):
        await last_life(broker, config, rebase=False)
    assert await last_life(broker, config, rebase=True) == [11, 12, 13, 14, 15]
    assert tickets(tmp_path / RUN) == (15, 12, 0, 0, 3, 0)  # 8, 9 and 10
    assert (await audited(broker, tmp_path / RUN, capsys))["problems"] == []


async def test_samples_of_an_older_store_that_has_grown(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hubs have stored other records where those were that the learner consumed."""
    config = settings(tmp_path, keep=False)
    await first_life(broker, config)
    await broker.lose(SAMPLES)
    async with broker.bus() as bus:
        await bus.ensure_streams()
        for number in range(1, 10):
            await bus.publish(SAMPLES, fleet.group(ticket(number, 2), 2), ticket=number)
    why = "the broker's samples hold another record 7 than the one that was consumed; it lost its store"
    with pytest.raises(UserError, match=why):
        await last_life(broker, config, rebase=False)
    # the rest of the log counts: the group of 8, and 9 before it was issued again
    assert await last_life(broker, config, rebase=True) == list(range(11, 18))
    assert tickets(tmp_path / RUN) == (17, 12, 0, 0, 5, 0)
    assert (await audited(broker, tmp_path / RUN, capsys))["problems"] == []
    async with broker.bus() as bus:
        assert await bus.first_seq(SAMPLES) > 7


async def test_before_the_first_checkpoint(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the ledger file knows that there was a life before."""
    config = settings(tmp_path, keep=False)
    config["checkpoint"]["every_steps"] = 100
    await first_life(broker, config)
    await broker.lose_everything()
    with pytest.raises(
        UserError,
        match=r"the broker's samples end at record 0, but 7 were consumed; it lost its store",
    ):
        await last_life(broker, config, rebase=False)
    assert await last_life(broker, config, rebase=True) == list(range(11, 23))
    assert tickets(tmp_path / RUN) == (22, 12, 0, 0, 10, 0)
    assert (await audited(broker, tmp_path / RUN, capsys))["problems"] == []


async def test_only_the_samples_are_lost(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(tmp_path, keep=False)
    await first_life(broker, config)
    await broker.lose(SAMPLES)
    with pytest.raises(
        UserError,
        match=r"the broker's samples end at record 0, but 7 were consumed; it lost its store",
    ):
        await last_life(broker, config, rebase=False)
    assert await last_life(broker, config, rebase=True) == list(range(11, 19))
    assert tickets(tmp_path / RUN) == (18, 12, 0, 0, 6, 0)
    assert (await audited(broker, tmp_path / RUN, capsys))["problems"] == []


async def test_killed_after_a_rebase_the_next_life_needs_no_flag(
    broker: Broker, tmp_path: Path
) -> None:
    """The checkpoint still holds groups that are gone; the log says that they are lost."""
    config, folder = settings(tmp_path, keep=False), tmp_path / RUN
    await first_life(broker, config)
    await broker.lose_everything()
    async with asyncio.timeout(120):
        life = asyncio.create_task(
            serve_learner(
                RunSettings.of_config(config),
                broker.url,
                Stop(),
                connect_deadline_s=60,
                rebase=True,
            )
        )
        await die_when(
            life,
            lambda: (
                [
                    line.ticket
                    for line in ledger_segments.LedgerLines(folder / ledger_segments.FOLDER)
                    if line.reason == "lost"
                ][-1:]
                == [8]
            ),
        )
    assert await last_life(broker, config, rebase=False) == list(range(11, 19))
    assert tickets(folder) == (18, 12, 0, 0, 6, 0)


async def test_without_a_loss_it_changes_nothing(broker: Broker, tmp_path: Path) -> None:
    config = settings(tmp_path, keep=False)
    await first_life(broker, config)

    async def answer_what_is_held(bus: Bus) -> None:
        for number, version in ((7, 2), (8, 2), (9, 3), (10, 3)):
            await bus.publish(SAMPLES, fleet.group(ticket(number, version), version), ticket=number)

    async with broker.bus() as bus:
        await answer_what_is_held(bus)
    # the queue may deliver again
    assert set(await last_life(broker, config, rebase=True)) <= {7, 8, 9, 10, 11, 12}
    assert tickets(tmp_path / RUN) == (12, 12, 0, 0, 0, 0)


@pytest.mark.parametrize("rebase", [False, True])
async def test_a_folder_without_its_checkpoints_is_left_as_it_is(
    broker: Broker, tmp_path: Path, rebase: bool
) -> None:
    """For example on a disk that is not mounted: the log was trimmed behind them, so nothing can
    begin again.
    """
    config, folder = settings(tmp_path, keep=True), tmp_path / RUN
    await last_life(broker, config, rebase=False)
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    files = {
        path: path.read_bytes()
        for name in ("ledger", "samples", "metrics.jsonl")
        for path in [folder / name, *folder.glob(f"{name}/*")]
        if path.is_file()
    }
    assert len(files) == 3
    async with broker.bus() as bus:
        first = await bus.first_seq(SAMPLES)
    assert first > 1
    config["train"]["steps"] = STEPS + 2
    with pytest.raises(UserError) as refused:
        await last_life(broker, config, rebase=rebase)
    assert str(refused.value) == (
        f"the broker's samples begin at record {first}, but record 1 is still to be read: the run has made checkpoints "
        f"that are no longer "
        f"in {folder / 'checkpoints'}; put them back, or choose another run.name"
    )
    assert {path: path.read_bytes() for path in files} == files
    (tmp_path / "elsewhere").rename(folder / "checkpoints")
    assert len(await last_life(broker, config, rebase=False)) >= 2 * 2


def test_the_flag_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["start", "--help"])
    assert "--rebase" in capsys.readouterr().out
