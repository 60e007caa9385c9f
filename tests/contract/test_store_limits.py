"""A broker whose store is full: what must be stored is, everything else waits, and each process
says so once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import learner_fleet as fleet
import msgspec
import pytest
from loop_kit import opened_ledger, running_loop, scored_group
from store_filler import LIMIT_MIB, Filler
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import (
    CONTROL,
    DEAD,
    PARTS,
    RESERVE,
    RUNS,
    SAMPLES,
    TICKETS,
    WEIGHTS,
    Stream,
)
from broker.errors import UserError
from broker.jetstream import reserve
from broker.jetstream.bus import Bus, LogRecord
from broker.jetstream.ticket_results import close_ticket
from broker.runtime.process import Stop
from broker.server.private_server import BrokerServer
from broker.settings.run_settings import RunSettings
from broker.settings.runspec import publish_runspec
from learner.checkpoints import checkpoint
from learner.credit import store_gate as gate_module
from learner.credit.ledger import Ledger
from learner.credit.store_gate import StoreGate
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.credit.tickets import close_by_timeout
from learner.reporting.metrics import read_lines
from learner.service import serve_learner


class Small(BrokerServer):
    """The server's limit, as in ``rlearner up``, or that of an account, as on a cluster."""

    def __init__(self, store: Path, *, account: bool) -> None:
        super().__init__(str(store), store_max_gib=(8 if account else LIMIT_MIB / 1024))
        self._account = account

    def _configuration(self) -> str:
        limits = f"{{ max_file: {LIMIT_MIB}MiB, max_mem: 64MiB }}"
        accounts = f"accounts {{ A {{ jetstream {limits}, users: [{{user: a, password: a}}] }} }}"
        return super()._configuration() + (
            f"{accounts}\nno_auth_user: a\n" if self._account else ""
        )


@pytest.fixture(params=["server", "account"])
def broker_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with Small(tmp_path / "broker", account=request.param == "account") as server:
        yield server.url


@pytest.fixture
async def filler(bus: Bus) -> AsyncIterator[Filler]:
    made = Filler(bus)
    yield made
    await made.free()


def closed(number: int) -> wire.Closed:
    return wire.Closed(ticket=number, domain="lake", reason="late", detail="too old", by="hub")


def spec(bus: Bus) -> wire.RunSpec:
    return wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=0, config={}, model_path=""
    )


async def held(bus: Bus) -> int:
    """Pieces of the reserve that are there."""
    return int((await bus.info(RESERVE))["state"]["bytes"]) // reserve.PIECE_BYTES


async def test_what_a_restart_needs_is_stored_in_a_full_broker(bus: Bus, filler: Filler) -> None:
    assert await reserve.fill_reserve(bus.link, bus.run, 0)
    assert await held(bus) == reserve.PIECES
    await filler.fill()
    assert not await reserve.has_room(bus.link, bus.run)
    ordinary = asyncio.create_task(bus.publish(SAMPLES, closed(1), ticket=1))
    await asyncio.sleep(1.0)
    assert not ordinary.done()
    async with asyncio.timeout(20):
        assert await publish_runspec(bus, spec(bus)) == 1
        await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="paused"))
        assert await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer]) == 1
    assert await held(bus) == 0
    assert await ordinary == 1
    found = await bus.key_value(RUNS).get(bus.run)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    assert found[0].epoch == 1


async def test_full_store_stops_no_closing_for_a_dead_letter(
    bus: Bus, filler: Filler, caplog: pytest.LogCaptureFixture
) -> None:
    """Letters are dropped, the learner's closings use the reserve, and a hub stores its closing
    before the letter.
    """
    await reserve.fill_reserve(bus.link, bus.run, 0)
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake", ticket=1)
    (delivery,) = await (await bus.work_queue(TICKETS, "lake")).fetch(1, LONG_S)
    await filler.fill()
    caplog.clear()
    async with asyncio.timeout(LONG_S):
        await bus.dead_letter(SAMPLES, seq=7, ticket=1, reason="truncated", data=b"x" * 5000)
        assert "no dead letter for message 7 of samples (truncated): " in caplog.text
        await close_by_timeout(bus, open_ledger(), 2, "timeout", "no record")
    assert await held(bus) == 0
    await filler.fill()
    closing = close_ticket(bus, delivery, TICKETS, closed(1), evaluation=False)
    storing = asyncio.create_task(closing)
    await until(lambda: "cannot store" in caplog.text)
    assert await bus.last_seq(SAMPLES) == 1
    await filler.free()
    async with asyncio.timeout(LONG_S):
        await storing
    found = [record.message async for record in _records(bus, SAMPLES, 2)]
    assert [record.ticket for record in found] == [2, 1]  # type: ignore[union-attr]
    assert (await bus.last_seq(DEAD), await bus.depth(TICKETS)) == (1, {})


async def test_store_fills_in_the_middle_of_parts(
    bus: Bus, filler: Filler, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hubs hold half of their groups' parts each, and no record refers to them: both end once
    there is room.
    """
    ledger = opened_ledger(groups_per_step=3)
    sent = [scored_group(ledger.ticket(number), 20_000_000) for number in (1, 2)]
    await filler.leave(24)
    async with running_loop(bus, ledger) as loop:
        storing = [
            asyncio.create_task(bus.publish(SAMPLES, one, ticket=one.ticket)) for one in sent
        ]
        await until(lambda: "cannot store" in caplog.text)
        assert (await bus.last_seq(SAMPLES), loop.done()) == (0, False)
        assert (await bus.depth(PARTS))[""] > 0
        await filler.free()
        async with asyncio.timeout(LONG_S):
            assert sorted(await asyncio.gather(*storing)) == [1, 2]  # type: ignore[type-var]
        await until(lambda: len(ledger.arrived) == 2 or loop.done())
        assert not loop.done(), loop.exception()


async def _records(bus: Bus, stream: Stream, count: int) -> AsyncIterator[LogRecord]:
    async with aclosing(bus.read_log(stream, 1)) as records:
        for _ in range(count):
            yield await anext(records)


async def test_a_store_too_small_for_any_run_is_refused_with_the_size_it_needs(
    tmp_path: Path,
) -> None:
    with BrokerServer(str(tmp_path / "small"), store_max_gib=0.2) as server:
        other = await Bus.connect(server.url, "r", name="learner", deadline_s=60)
        try:
            with pytest.raises(
                UserError,
                match=r"no room for rl_r_evals: .*; each run reserves 320 MiB, so let the broker store more",
            ):
                await other.ensure_streams()
        finally:
            await other.close()


def big_group(ticket: wire.Ticket) -> wire.Group:
    """2 MiB on the wire, next to nothing to train on."""
    return msgspec.structs.replace(
        fleet.group(ticket, ticket.min_version), frames=["x" * (1 << 21)]
    )


async def test_it_is_said_once_and_once_more_when_it_is_over(
    bus: Bus, filler: Filler, caplog: pytest.LogCaptureFixture
) -> None:
    await filler.fill()
    publishes = [
        asyncio.create_task(bus.publish(SAMPLES, closed(number), ticket=number))
        for number in range(1, 41)
    ]
    await asyncio.sleep(4.0)  # of the old and the new pauses many have passed
    assert not any(publish.done() for publish in publishes)
    said = [record.getMessage() for record in caplog.records if "store" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(
        f"rl.{bus.run}.samples: the broker at {bus.link.where} cannot store: "
    )
    assert bus.link.refusals.full
    await filler.free()
    async with asyncio.timeout(20):
        assert sorted(await asyncio.gather(*publishes)) == list(range(1, 41))
    said = [record.getMessage() for record in caplog.records if "store" in record.getMessage()]
    assert len(said) == 2
    assert said[1].startswith(f"the broker at {bus.link.where} stores again after ")
    assert not bus.link.refusals.full


async def test_who_stops_waiting_is_not_waited_for(bus: Bus, filler: Filler) -> None:
    await filler.fill()
    publish = asyncio.create_task(bus.publish(SAMPLES, closed(1), ticket=1))
    await asyncio.sleep(0.5)
    assert bus.link.refusals.full
    publish.cancel()
    await asyncio.gather(publish, return_exceptions=True)
    assert not bus.link.refusals.full


# --------------------------------------------------------------------------------------- the
# learner holds tickets back


def open_ledger() -> Ledger:
    """Of which six tickets are open."""
    lake = DomainRule("lake", 1.0, 2, 2, 9.0)
    made = Ledger(
        TicketRules(
            steps=9, groups_per_step=2, max_staleness=2, on_late="wait", seed=7, domains=(lake,)
        )
    )
    made.open_credit()
    return made


async def tickets(bus: Bus, ledger: Ledger, count: int) -> None:
    for number in range(1, count + 1):
        ticket = ledger.ticket(number)
        await bus.publish(
            TICKETS, ticket, key=ticket.domain, ticket=number, expected_last_seq=number - 1
        )


async def test_tickets_wait_until_the_log_is_trimmed(
    bus: Bus, filler: Filler, caplog: pytest.LogCaptureFixture
) -> None:
    await filler.leave(48)
    ledger, said, relieved = open_ledger(), list[str](), list[bool]()

    async def relieve() -> None:
        relieved.append(gate.pressed)

    gate = StoreGate(bus, ledger, LIMIT_MIB / 1024, 8.0, said.append, relieve)
    await gate.look()
    # 8 MiB of the 48, so the run may fill 40, and tickets wait above 32
    assert await held(bus) == reserve.PIECES
    await tickets(bus, ledger, 2)
    for _ in range(11):
        await bus.publish(SAMPLES, big_group(ledger.ticket(1)), ticket=1)  # 2 MiB each
    await gate.look()
    assert not gate.pressed
    waiting = [asyncio.create_task(gate.wait(number)) for number in range(3, 7)]
    await asyncio.sleep(0.3)
    await gate.look()
    # 22 MiB, and 2 for each of four tickets under way
    assert [one.done() for one in waiting] == [True, True, False, False]
    await bus.publish(SAMPLES, big_group(ledger.ticket(2)), ticket=2)
    await bus.publish(SAMPLES, big_group(ledger.ticket(2)), ticket=2)
    relieved.clear()
    await gate.look()
    assert gate.pressed
    assert relieved == [True]
    await bus.trim(SAMPLES, 12)
    await bus.trim_parts(SAMPLES, keep=lambda number: number == 2)
    for _ in range(2):
        await gate.look()
        await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
    assert not gate.pressed
    relieved.clear()
    await gate.look()
    assert relieved == []
    lines = [record.getMessage() for record in caplog.records if "store" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith(
        "the broker's store is nearly full (334.0 MiB of 352.0 MiB, 22.0 MiB of it this run's): tickets wait until"
    )
    assert (
        lines[1]
        == "the broker's store has room again (316.0 MiB of 352.0 MiB, 4.0 MiB of it this run's); tickets go on"
    )
    assert said == [lines[0], ""]


async def test_a_run_of_many_times_the_store_gets_through_it(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    filler: Filler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No schedule asks for a checkpoint; without one nothing is trimmed, and after two dozen groups
    the store would be full.
    """
    monkeypatch.setattr(gate_module, "LOOK_EVERY_S", 0.3)
    await filler.leave(64)
    steps, groups = 40, 4
    config = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": steps, "groups_per_step": groups, "max_staleness": 1},
        checkpoint={"every_minutes": 0},
        broker={"store_max_gib": LIMIT_MIB / 1024},
    )
    async with fleet.Hub(bus, lambda ticket: [big_group(ticket)]), asyncio.timeout(2 * LONG_S):
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, Stop(), connect_deadline_s=60)
        )
        await learner
    lines = read_lines(tmp_path / run_name / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    ended = [
        lines[-1][f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    ]
    assert ended == [steps * groups, steps * groups, 0, 0, 0, 0]
    assert "cannot store" not in caplog.text
    assert await bus.first_seq(SAMPLES) > (steps - 8) * groups


async def test_a_learner_takes_a_run_over_in_a_full_store_and_trims_it(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, filler: Filler
) -> None:
    train = {"steps": 100_000, "groups_per_step": 2}
    config = fleet.config(str(tmp_path), run_name, train=train, checkpoint={"every_steps": 1})
    folder = tmp_path / run_name

    def steps() -> list[int]:
        return [line["step"] for line in read_lines(folder / "metrics.jsonl")]

    async with (
        fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)]),
        asyncio.timeout(2 * LONG_S),
    ):
        stop = Stop()
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60)
        )
        await until(lambda: len(checkpoint.list_checkpoints(folder / "checkpoints")) == 2)
        stop.request("test")
        await learner
        assert await held(bus) == reserve.PIECES
        before = steps()[-1]
        await filler.fill()
        stop = Stop()
        learner = asyncio.create_task(
            serve_learner(RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60)
        )
        await until(lambda: epoch(bus, 2))
        assert not learner.done()
        await filler.free()
        await until(lambda: steps()[-1] > before + 2)
        stop.request("test")
        await learner
    assert steps() == list(range(1, steps()[-1] + 1))


async def epoch(bus: Bus, wanted: int) -> bool:
    found = await bus.key_value(RUNS).get(bus.run)
    return found is not None and isinstance(found[0], wire.RunSpec) and found[0].epoch == wanted
