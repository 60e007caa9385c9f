"""``rlearner exporter``: what it shows of a run, of processes that left, and of a broker that died."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from declared_metrics import differences
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from bench.advice.speeds import FleetSpeeds
from bench.advice.virtual_run import run_fleet, settings_of
from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, PRESENCE, RUNS, TICKETS
from broker.errors import UserError
from broker.identity import tokens
from broker.identity.login import keys_of
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import publish_metrics
from broker.runtime.member import Member, Stop
from broker.runtime.vouching import PresenceSigner
from broker.server.private_server import BrokerServer
from rlearner.exporter.run_figures import BrokerFigures, Queue, RunFigures
from rlearner.exporter.service import _follow, ask_broker, export

Values = dict[tuple[str, ...], float]


def scrape(figures: RunFigures) -> Values:
    """Return each series as (name, label values by label name …) without the run; it is valid
    OpenMetrics.
    """
    registry = CollectorRegistry()
    registry.register(figures)
    found: Values = {}
    names = []
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    assert differences(families) == []
    for family in families:
        names.append(family.name)
        for one in family.samples:
            found[
                (one.name, *(value for name, value in sorted(one.labels.items()) if name != "run"))
            ] = one.value
    assert len(names) == len(set(names))
    return found


async def until(
    figures: RunFigures, condition: Callable[[Values], bool], within_s: float = 20.0
) -> Values:
    deadline = time.monotonic() + within_s
    while not condition(values := scrape(figures)):
        assert time.monotonic() < deadline, values
        await asyncio.sleep(0.1)
    return values


def presence(role: str, name: str, **more: object) -> wire.Presence:
    about = {"host": "here", "pid": 1, "state": "serving", "slots": 8, "running": 3}
    return wire.Presence(role=role, id=name, **{**about, **more})  # type: ignore[arg-type]


def ticket(number: int) -> wire.Ticket:
    return wire.Ticket(
        number=number, domain="lake", task_index=0, seed=1, min_version=0, max_staleness=1, group_size=2,
        min_group_size=1, deadline_s=10.0,
    )  # fmt: skip


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlearner.exporter.service.ASK_EVERY_S", 0.2)


async def test_a_run_is_shown_and_processes_that_left_are_not(bus: Bus, quick: None) -> None:
    config = {"train": {"steps": 50, "max_staleness": 3}, "broker": {"store_max_gib": 2.0}}
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=2, config=config, model_path="m"
    )
    await bus.key_value(RUNS).put(bus.run, spec)
    await bus.ensure_consumers(TICKETS, ["lake", "maze"])
    for number in (1, 2, 3):
        await bus.publish(TICKETS, ticket(number), key="lake", ticket=number)
    queue = await bus.work_queue(TICKETS, "lake")
    held = (await queue.fetch(1, 5.0))[0]
    await bus.dead_letter(TICKETS, seq=9, ticket=0, reason="broken", data=b"x")
    figures, stop = RunFigures(bus.run), Stop()
    following = asyncio.create_task(_follow(bus, figures, stop))
    member = Member(bus, spec, "learner", "learner", Stop())
    member.announce(lambda: presence("learner", "learner", policy_version=7))
    line = {"reward/mean": 0.75, "queue/samples/depth": 4.0, "ticket/issued": 12.0}
    await asyncio.sleep(0.5)
    for values in (line | {"reward/mean": 0.5, "eval/step": 5.0, "eval/success_rate": 1.0}, line):
        await publish_metrics(
            bus, wire.Metrics(role="learner", id="learner", time=0.0, values=values)
        )
    hub = wire.Metrics(
        role="envhub", id="hub-1", time=0.0, values={"envhub/groups": 9.0, "time/generate": 0.25}
    )
    await publish_metrics(bus, hub)
    entered = presence("envhub", "hub-1", problem="its domain fails")
    await bus.key_value(MEMBERS).put(f"{bus.run}.envhub.hub-1", PresenceSigner(bus).signed(entered))
    values = await until(figures, lambda found: found.get(("rlearner_processes", "envhub")) == 1
                         and found.get(("rlearner_processes", "learner")) == 1
                         and ("rlearner_reward_mean", "learner", "learner") in found)  # fmt: skip
    depth = f"rl.{bus.run}.tickets"
    expected = {
        ("rlearner_exporter_up",): 1,
        ("rlearner_queue_depth", "tickets", f"{depth}.lake"): 3,
        ("rlearner_queue_pending", "tickets", f"{depth}.lake"): 2,
        ("rlearner_queue_held", "tickets", f"{depth}.lake"): 1,
        ("rlearner_queue_depth", "tickets", f"{depth}.maze"): 0,
        ("rlearner_queue_depth", "samples", f"rl.{bus.run}.samples"): 4,
        ("rlearner_dead_letters", "tickets"): 1,
        ("rlearner_dead_letters", "episodes"): 0,
        ("rlearner_stream_messages", "tickets"): 3,
        ("rlearner_run_max_staleness",): 3,
        ("rlearner_run_steps",): 50,
        ("rlearner_run_epoch",): 2,
        ("rlearner_run_desired", "running"): 1,
        ("rlearner_jetstream_store_limit_bytes",): 2 * 2**30,
        ("rlearner_processes", "rollout"): 0,
        ("rlearner_reward_mean", "learner", "learner"): 0.75,
        ("rlearner_eval_success_rate", "learner", "learner"): 1,
        ("rlearner_ticket_issued_total", "learner", "learner"): 12,
        ("rlearner_envhub_groups_total", "hub-1", "envhub"): 9,
        ("rlearner_time_generate_seconds", "hub-1", "envhub"): 0.25,
        ("rlearner_member_problem", "hub-1", "envhub"): 1,
        ("rlearner_member_problem", "learner", "learner"): 0,
        ("rlearner_member_policy_version", "learner", "learner"): 7,
        ("rlearner_member_state", "hub-1", "envhub", "ready"): 1,
    }
    assert {name: values.get(name) for name in expected} == expected
    assert values["rlearner_jetstream_store_bytes",] > 0
    await held.ack()
    await member.leave()
    await bus.key_value(MEMBERS).delete(f"{bus.run}.envhub.hub-1")
    later = await until(figures, lambda found: found["rlearner_processes", "envhub"] == 0
                        and found["rlearner_processes", "learner"] == 0
                        and found["rlearner_queue_depth", "tickets", f"{depth}.lake"] == 2)  # fmt: skip
    assert not [name for name in later if name[0].startswith("rlearner_member_")]
    stop.request("test")
    await following


def test_what_is_silent_is_dropped_and_the_broker_goes_stale() -> None:
    now = [100.0]
    figures = RunFigures("quick", clock=lambda: now[0])
    message = wire.Metrics(role="envhub", id="hub-1", time=0.0, values={"envhub/groups": 9.0})
    figures.is_connected = True
    figures.hear("rl.quick.metrics.envhub.hub-1", codec.encode(message))
    figures.hear("rl.quick.metrics.envhub.hub-2", b"\xff")
    figures.answer(BrokerFigures(queues=[Queue("tickets", "rl.quick.tickets.lake", 2, 1, 0, 0)]))
    values = scrape(figures)
    assert values["rlearner_envhub_groups_total", "hub-1", "envhub"] == 9
    assert values["rlearner_exporter_up",] == 1
    assert scrape(figures)["rlearner_exporter_malformed_total",] == 1
    now[0] += 11.0
    figures.fail()
    figures.forget_silent()
    values = scrape(figures)
    assert ("rlearner_envhub_groups_total", "hub-1", "envhub") not in values
    assert values["rlearner_queue_depth", "tickets", "rl.quick.tickets.lake"] == 3
    now[0] += 10.0
    values = scrape(figures)
    assert values["rlearner_exporter_up",] == 0
    assert values["rlearner_exporter_failures_total",] == 1
    assert not [name for name in values if name[0] == "rlearner_queue_depth"]


def test_desired_servers_are_shown_once_enough_steps_are_known() -> None:
    """One server with four slots: the learner could use many more; with a step of 60 s, this one
    suffices.
    """
    for speeds, expected in (
        (FleetSpeeds(servers=1, slots=4), range(4, 20)),
        (FleetSpeeds(step_s=60.0), range(1, 2)),
    ):
        figures, rows = RunFigures("quick"), run_fleet(speeds, 12)
        spec = wire.RunSpec(
            run="quick",
            wire_version=1,
            epoch=1,
            config=settings_of(speeds, 12).to_plain(),
            model_path="m",
        )
        figures.is_connected = True
        figures.answer(BrokerFigures(spec=spec))
        for row in rows:
            message = wire.Metrics(role="learner", id="learner", time=0.0, values=row)
            figures.hear("rl.quick.metrics.learner.learner", codec.encode(message))
            figures.advise()
            values = scrape(figures)
            assert (("rlearner_desired_servers",) in values) == (row["step"] >= 6)
        assert values["rlearner_desired_servers",] in expected


async def test_a_broker_that_dies_and_returns(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlearner.exporter.service.ANSWER_WITHIN_S", 1.0)
    with BrokerServer(str(tmp_path / "store")) as server:
        maker = await Bus.connect(server.url, "quick", name="maker", deadline_s=30)
        await maker.ensure_streams()
        bus = await Bus.connect(server.url, "quick", name="exporter", deadline_s=30)
        figures, stop = RunFigures("quick"), Stop()
        following = asyncio.create_task(_follow(bus, figures, stop))
        await until(figures, lambda found: found["rlearner_exporter_up",] == 1)
        assert (stop.health.state, stop.health.status) == ("ready", "run quick")
        await asyncio.to_thread(server.stop)
        values = await until(figures, lambda found: found["rlearner_exporter_up",] == 0)
        assert ("rlearner_processes", "rollout") not in values
        await until(figures, lambda found: found["rlearner_exporter_failures_total",] >= 1)
        assert (stop.health.state, stop.health.status) == (
            "failed",
            "run quick: its broker does not answer",
        )
        await asyncio.to_thread(server.start)
        await until(figures, lambda found: found["rlearner_exporter_up",] == 1, 40.0)
        beat = PresenceSigner(maker).signed(presence("rollout", "server-1"))
        await maker.link.ready()
        for _ in range(80):
            await maker.link.send(PRESENCE.subject("quick", "rollout.server-1"), codec.encode(beat))
            if scrape(figures).get(("rlearner_processes", "rollout")):
                break
            await asyncio.sleep(0.1)
        assert scrape(figures)["rlearner_processes", "rollout"] == 1
        stop.request("test")
        await following
        await bus.close()
        await maker.close()


def options(run: str, broker: str | None, folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        run_name=run, dir=str(folder), broker=broker, join=None, connect_deadline=10.0, metrics_port=None,
        metrics_bind="127.0.0.1", log_level="INFO", log_format="text", log_file=None,
    )  # fmt: skip


async def test_a_run_without_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^no run 'nothing' below {tmp_path}; there is none; name its folder"
    ):
        await export(options("nothing", None, tmp_path), Stop())


async def test_an_observers_token_sees_the_run_until_it_is_revoked(
    bus: Bus, broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlearner.exporter.service.ASK_EVERY_S", 0.2)
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.publish(TICKETS, ticket(1), key="lake", ticket=1)
    keys, place = keys_of(broker_url), tmp_path / "observer.token"
    tokens.write_token(
        tokens.make_join_token(
            keys, broker_url, "observer", bus.run, name="grafana", expires_s=600
        ),
        place,
    )
    made, stop, shown = options(bus.run, None, tmp_path), Stop(), list[RunFigures]()
    monkeypatch.setattr(
        "rlearner.exporter.service.serve_metrics", lambda _, __, figures: shown.append(figures)
    )
    made.join = str(place)
    exporting = asyncio.create_task(export(made, stop))
    await asyncio.sleep(0.5)
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=5, config={}, model_path="m"
    )
    await bus.key_value(RUNS).put(bus.run, spec)
    member = Member(bus, spec, "server-1", "rollout", Stop())
    member.announce(lambda: presence("rollout", "server-1"))
    values = await until(shown[0], lambda found: found.get(("rlearner_processes", "rollout")) == 1)
    assert values["rlearner_run_epoch",] == 5
    assert values["rlearner_queue_depth", "tickets", f"rl.{bus.run}.tickets.lake"] == 1
    await member.leave()
    keys.revoke(next(user for user in keys.users() if user.name == "grafana"))
    with pytest.raises(UserError, match="refuses the key"):
        await asyncio.wait_for(exporting, 30)


async def test_a_token_of_another_run_or_role_is_one_line(
    bus: Bus, broker_url: str, tmp_path: Path
) -> None:
    keys = keys_of(broker_url)
    for role in ("observer", "envhub"):
        tokens.write_token(
            tokens.make_join_token(keys, broker_url, role, bus.run, name=role, expires_s=600),
            tmp_path / role,
        )
    other = options("other", None, tmp_path)
    other.join = str(tmp_path / "observer")
    with pytest.raises(
        UserError, match=f"^exporter other: the token {other.join} is for run {bus.run}$"
    ):
        await export(other, Stop())
    other.join = str(tmp_path / "envhub")
    with pytest.raises(UserError, match="this token is for envhub envhub, not for observer"):
        await export(other, Stop())


async def test_a_run_that_comes_later_is_awaited(
    bus: Bus, broker_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Stop()
    exporting = asyncio.create_task(export(options(bus.run, broker_url, tmp_path), stop))
    for _ in range(100):
        if said := [
            record.message for record in caplog.records if "waiting for run" in record.message
        ]:
            break
        await asyncio.sleep(0.1)
    assert said == [stop.health.status]
    assert said[0].startswith(f"waiting for run {bus.run}; the broker at {broker_url} has ")
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="m"
    )
    await bus.key_value(RUNS).put(bus.run, spec)
    for _ in range(100):
        if stop.health.is_ready:
            break
        await asyncio.sleep(0.1)
    assert stop.health.status == f"run {bus.run}"
    stop.request("test")
    await exporting


async def test_the_broker_is_asked_for_every_stored_stream(bus: Bus) -> None:
    found = await ask_broker(bus)
    assert found.messages.keys() >= {
        "tickets",
        "episodes",
        "samples",
        "parts",
        "evals",
        "dead",
        "weights",
        "runs",
    }
    assert (found.spec, found.offer, found.desired, found.queues) == (None, None, "running", [])
