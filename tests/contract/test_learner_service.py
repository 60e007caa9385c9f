"""The real learner over a real nats-server; only the fleet is made up."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import learner_fleet as fleet
import pytest
import torch
from declared_metrics import undeclared

from broker.contract import wire
from broker.contract.streams import CONTROL, DEAD, MEMBERS, RUNS, SAMPLES, TICKETS, WEIGHTS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.announce import Announcer
from broker.runtime.process import Stop, Stopped
from broker.settings.run_settings import RunSettings
from broker.weights.group import WaitMonitor
from broker.weights.memory.staging import FlatBuffer
from broker.weights.snapshots.snapshot_source import SnapshotSource
from learner.checkpoints import checkpoint
from learner.service import serve_learner

Answer = Callable[[wire.Ticket], list[wire.Message | bytes]]


def plain(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    return [fleet.group(ticket, ticket.min_version)]


async def run(
    bus: Bus, url: str, config: dict[str, Any], answer: Answer = plain, stop: Stop | None = None
) -> fleet.Hub:
    async with fleet.Hub(bus, answer) as hub, asyncio.timeout(240):
        await serve_learner(
            RunSettings.of_config(config), url, stop or Stop(), connect_deadline_s=60
        )
    return hub


async def run_apart(url: str, config: dict[str, Any]) -> None:
    """Another run from beginning to end, undisturbed, on a connection of its own."""
    bus = await Bus.connect(url, config["run"]["name"], name="apart", deadline_s=60)
    await bus.ensure_streams()
    await run(bus, url, config)
    await bus.delete_streams()
    await bus.close()


def lines(config: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(config["run"]["dir"]) / config["run"]["name"] / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert undeclared(name for row in rows for name in row) == set()
    return rows


def tickets_of(line: dict[str, Any]) -> tuple[int, ...]:
    numbers = [
        line[f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    ]
    assert numbers[0] == sum(numbers[1:])
    return tuple(numbers)


@pytest.mark.parametrize(
    ("max_staleness", "min_versions", "staleness", "issued"),
    [
        (0, [0, 0, 1, 1, 2, 2], [0, 0, 0], [4, 6, 6]),
        (1, [0, 0, 0, 0, 1, 1], [0, 1, 1], [6, 6, 6]),
        (4, [0, 0, 0, 0, 0, 0], [0, 1, 2], [6, 6, 6]),
    ],
)
async def test_credit_steps_and_lines(
    bus: Bus,
    broker_url: str,
    run_name: str,
    tmp_path: Path,
    max_staleness: int,
    min_versions: list[int],
    staleness: list[float],
    issued: list[int],
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"max_staleness": max_staleness})
    hub = await run(bus, broker_url, config)
    assert [ticket.number for ticket in hub.tickets] == [1, 2, 3, 4, 5, 6]
    assert [ticket.min_version for ticket in hub.tickets] == min_versions
    assert [ticket.task_index for ticket in hub.tickets] == [0, 1, 2, 3, 4, 5]
    found = lines(config)
    assert [(line["step"], line["policy_version"]) for line in found] == [(1, 1), (2, 2), (3, 3)]
    assert [line["staleness/mean"] for line in found] == staleness
    assert [line["staleness/max"] for line in found] == staleness
    assert [tickets_of(line)[:2] for line in found] == [
        (n, 2 * (i + 1)) for i, n in enumerate(issued)
    ]
    assert tickets_of(found[-1]) == (6, 6, 0, 0, 0, 0)
    for line in found:
        expected = {
            "reward/mean": 0.5,
            "reward/max": 1.0,
            "reward/min": 0.0,
            "reward/lake/mean": 0.5,
            "env/success_rate": 0.5,
            "env/valid_action_rate": 0.5,
            "env/num_turns": 1.0,
            "env/moves": 2.5,
            "response_length/mean": 3.0,
            "response_length/clip_ratio": 0.0,
            "frac_reward_zero_std": 0.0,
            "filter/count": 0.0,
            "actor/num_tokens": 12.0,
            "actor/num_rows": 4.0,
            "time/generate": 0.5,
            "time/env_step": 0.25,
            "rollouter/idle_ratio": 1.0,
        }
        assert {name: line[name] for name in expected} == expected
        assert 0 <= line["trainer/idle_ratio"] <= 1
        assert line["perf/tokens_per_s"] == pytest.approx(3 * line["perf/samples_per_s"])
        assert line["actor/grad_norm"] > 0


class SlowImport(MetaPathFinder):
    """Takes seconds to find a module, as a slow disk does."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "learner.weights.offering":
            time.sleep(4)


async def test_imports_do_not_block_the_event_loop_which_a_watchdog_follows(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "learner.weights.offering", raising=False)
    monkeypatch.setattr(sys, "meta_path", [SlowImport(), *sys.meta_path])
    stop = Stop()
    stop.health.beat_every_s = 0.05
    beating = asyncio.create_task(stop.health.keep_beating())
    await run(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}), stop=stop)
    beating.cancel()
    assert "learner.weights.offering" in sys.modules
    assert stop.health.lag_s < 3


async def test_what_is_left_behind(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from transformers import AutoModelForCausalLM, AutoTokenizer

    evaluation = {"every_steps": 2, "tasks": 4, "timeout_s": 30.0}
    monkeypatch.setenv("RL_API_KEY", "a-key-of-sixteen-or-more")
    train = {"max_staleness": 0, "weights_snapshot_every": 2, "weights_snapshot_port": 0}
    config = fleet.config(
        str(tmp_path), run_name, eval=evaluation, checkpoint={"every_steps": 1}, train=train
    )
    hub = await run(bus, broker_url, config)
    control = await bus.key_value(CONTROL).get(run_name)
    assert control is not None
    assert control[0] == wire.DesiredState(state="stopped", reason="all steps are done")
    spec = await bus.key_value(RUNS).get(run_name)
    assert spec is not None
    assert isinstance(spec[0], wire.RunSpec)
    assert (spec[0].epoch, spec[0].config) == (1, config)
    # it said farewell
    assert await bus.key_value(MEMBERS).get(f"{run_name}.learner.learner") is None
    async for offer in bus.watch_last(WEIGHTS):
        assert isinstance(offer, wire.WeightsOffer)
        assert (offer.epoch, offer.version) == (1, 3)
        break
    folder = tmp_path / run_name
    kept = [
        checkpoint.read_checkpoint(path).step
        for path in checkpoint.list_checkpoints(folder / "checkpoints")
    ]
    # the second step may end before the checkpoint of the first is written
    assert kept in ([1, 3], [2, 3])
    newest = folder / "checkpoints" / "step-000003"
    tokenizer = AutoTokenizer.from_pretrained(newest)
    model = AutoModelForCausalLM.from_pretrained(newest)
    assert model.config.model_type == "qwen3"
    source = SnapshotSource(str(folder / "snapshots"))
    manifest = source.newest()
    assert manifest is not None
    # the last, though 2 does not divide it
    assert (manifest.run, manifest.offer) == (run_name, offer)
    flat = FlatBuffer(manifest.plan)
    source.fill(manifest, flat, WaitMonitor())
    assert all(
        torch.equal(flat.tensors[name], parameter) for name, parameter in model.named_parameters()
    )
    assert len(tokenizer) <= model.config.vocab_size
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [
        (1, 0.5),
        (2, 0.5),
        (3, 0.5),
    ]
    # four held-out tasks of which two succeed: at the start, after step 2 and after the last
    asked = [
        (ticket.eval_step, ticket.task_index, ticket.policy, ticket.min_version)
        for ticket in hub.eval_tickets
    ]
    assert asked == [(step, index, "actor", step) for step in (0, 2, 3) for index in range(4)]
    assert len({(ticket.task_index, ticket.seed) for ticket in hub.eval_tickets}) == 4
    found = lines(config)
    assert [line["step"] for line in found] == [1, 2, 3]
    last = found[-1]
    quantiles = {"p10": 0.0, "p50": 0.5, "p90": 1.0}  # of two zeros and two ones
    assert {name: value for name, value in last.items() if name.startswith("eval/")} == {
        "eval/success_rate": 0.5,
        "eval/reward_mean": 0.5,
        "eval/step": 3.0,
        "eval/policy_version_min": 3.0,
        "eval/policy_version_max": 3.0,
        "eval/num_episodes": 4.0,
        "eval/num_closed": 0.0,
        "eval/domain/lake/success_rate": 0.5,
        **{f"eval/domain/lake/episode_tokens_{name}": 3.0 for name in ("mean", *quantiles)},
        "eval/domain/lake/reward_mean": 0.5,
        **{f"eval/domain/lake/reward_{name}": value for name, value in quantiles.items()},
        "eval/domain/lake/num_turns": 1.0,
        "eval/domain/lake/clip_ratio": 0.0,
    }
    rows = [
        json.loads(line)
        for line in (folder / "evals" / "actor-step-000003.jsonl").read_text().splitlines()
    ]
    assert [(row["task_index"], row["success"]) for row in rows] == [
        (0, [False]),
        (1, [True]),
        (2, [False]),
        (3, [True]),
    ]
    # the log is trimmed behind the oldest checkpoint that is kept: a step consumes two records,
    # behind the one with the rules; the last record that the checkpoint covers stays
    assert await bus.first_seq(SAMPLES) == 1 + 2 * kept[0]


async def test_malformed_duplicate_and_closed_records(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        good = fleet.group(ticket, ticket.min_version)
        match ticket.number:
            case 1:
                # its bytes close the ticket; the group after them is a duplicate
                return [b"\x81no message", good]
            case 2:
                return [good, good]
            case 3:
                return [
                    wire.Closed(
                        ticket=3, domain="lake", reason="late", detail="too old", by="made-up"
                    )
                ]
            case 4:
                return [
                    wire.Closed(
                        ticket=4, domain="lake", reason="env_error", detail="it broke", by="made-up"
                    )
                ]
            case 5:
                return [fleet.group(ticket, 7)]  # tokens of a version that does not exist
            case _:
                return [good]

    config = fleet.config(str(tmp_path), run_name, train={"max_staleness": 1, "steps": 2})
    hub = await run(bus, broker_url, config, answer)
    assert [ticket.number for ticket in hub.tickets] == list(range(1, 9))
    assert [ticket.task_index for ticket in hub.tickets] == list(range(8))
    last = lines(config)[-1]
    assert tickets_of(last) == (8, 4, 0, 1, 3, 0)
    assert last["ticket/closed_late"] == 1
    assert last["ticket/closed_env_error"] == 1
    assert last["ticket/closed_malformed"] == 2
    letters = []
    async for entry in bus.read_log(DEAD, 1):
        assert isinstance(entry.message, wire.DeadLetter)
        letters.append(
            (
                entry.message.stream,
                entry.message.sequence,
                entry.message.ticket,
                entry.message.data[:4],
            )
        )
        if len(letters) == 2:
            break
    assert letters[0] == ("samples", 2, 1, b"\x81no ")
    assert letters[1][:3] == ("samples", 8, 5)
    # ticket 1's group; the second of ticket 2 may come after the end
    assert last["ticket/duplicate"] >= 1


async def test_late_groups_are_dropped_and_replaced(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    held: list[wire.Ticket] = []

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 1:
            held.append(ticket)
            return []
        late = [fleet.group(held.pop(), 0)] if ticket.min_version == 2 and held else []
        return [*late, fleet.group(ticket, ticket.min_version)]

    config = fleet.config(
        str(tmp_path),
        run_name,
        train={"max_staleness": 1, "steps": 4, "groups_per_step": 1, "on_late": "drop"},
    )
    hub = await run(bus, broker_url, config, answer)
    assert [(ticket.number, ticket.min_version) for ticket in hub.tickets] == [
        (1, 0),
        (2, 0),
        (3, 1),
        (4, 2),
        (5, 2),
    ]
    assert tickets_of(lines(config)[-1]) == (5, 4, 0, 1, 0, 0)
    assert max(line["staleness/max"] for line in lines(config)) <= 1


async def test_tickets_that_nobody_ends_are_closed(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    lake = {
        "env": "frozenlake",
        "group_size": 2,
        "max_turns": 4,
        "max_context_tokens": 64,
        "deadline_s": 1,
        "sampling": {"max_tokens": 4},
    }
    train = {"ticket_timeout_s": 1.5, "steps": 1, "groups_per_step": 1}
    config = fleet.config(str(tmp_path), run_name, train=train, domains={"lake": lake})
    here = wire.Presence(
        role="envhub", id="hub", host="here", pid=1, state="serving", serves=["lake"]
    )
    announcer = Announcer(bus, lambda: here)
    await announcer.start()
    await run(bus, broker_url, config, lambda ticket: [] if ticket.number == 1 else plain(ticket))
    await announcer.close()
    last = lines(config)[-1]
    assert tickets_of(last) == (2, 1, 0, 0, 1, 0)
    assert last["ticket/closed_timeout"] == 1


async def test_a_second_run_of_the_same_name_is_refused(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path / "a"), run_name, train={"steps": 1})
    await run(bus, broker_url, config)
    with pytest.raises(
        UserError, match=r"the broker already has a run test-.*choose another run\.name"
    ):
        await run(bus, broker_url, fleet.config(str(tmp_path / "b"), run_name, train={"steps": 1}))


async def test_a_completed_run_ends_well_however_often_it_is_started(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed behind its last word, a learner is started again by its supervisor, which takes
    anything but 0 for a failure.
    """
    config = fleet.config(str(tmp_path), run_name, train={"steps": 1})
    await run(bus, broker_url, config)
    for _ in range(2):
        with pytest.raises(Stopped, match="all steps are done"):
            await run(bus, broker_url, config)
    assert (
        caplog.messages.count(
            f"run {run_name} has completed its 1 steps: nothing is left to do; raise train.steps to continue, or "
            f"choose another run.name"
        )
        == 2
    )
    found = await bus.key_value(CONTROL).get(run_name)
    assert found is not None
    assert found[0] == wire.DesiredState(state="stopped", reason="all steps are done")


async def test_fewer_steps_than_were_made_are_refused_before_anything_changes(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 2})
    await run(bus, broker_url, config)
    written = (tmp_path / run_name / "config.yaml").read_bytes()
    with pytest.raises(
        UserError, match=r"train\.steps: 1 is not allowed; run .* has made 2 steps already"
    ):
        await run(bus, broker_url, fleet.config(str(tmp_path), run_name, train={"steps": 1}))
    assert (tmp_path / run_name / "config.yaml").read_bytes() == written


async def test_killed_behind_the_last_checkpoint_the_next_life_tells_the_others(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 1})
    await run(bus, broker_url, config)
    control = bus.key_value(CONTROL)
    # as it stands when the kill comes before the last word
    await control.put(run_name, wire.DesiredState(state="running"))
    with pytest.raises(Stopped):
        await run(bus, broker_url, config)
    found = await control.get(run_name)
    assert found is not None
    assert found[0] == wire.DesiredState(state="stopped", reason="all steps are done")


async def test_stop_and_resume_from_the_same_log(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """Stopped in the middle and started again: every ticket trained once, the same weights as a run
    that was never stopped.
    """
    from safetensors.numpy import load_file

    settings = {"max_staleness": 1, "steps": 4}
    whole = fleet.config(str(tmp_path), f"{run_name}-whole", train=settings)
    await run_apart(broker_url, whole)

    stop = Stop()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 7:
            stop.request("test")
        return plain(ticket)

    config = fleet.config(str(tmp_path), run_name, train=settings)
    hub = await run(bus, broker_url, config, answer, stop)
    assert len(lines(config)) < 4
    rest = await run(bus, broker_url, config)
    numbers = [ticket.number for ticket in hub.tickets + rest.tickets]
    assert sorted(numbers) == list(range(1, 9))
    found = lines(config)
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert tickets_of(found[-1]) == (8, 8, 0, 0, 0, 0)
    assert await bus.last_seq(TICKETS) == 8
    spec = await bus.key_value(RUNS).get(run_name)
    assert spec is not None
    assert isinstance(spec[0], wire.RunSpec)
    assert spec[0].epoch == 2
    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step-000004" / "model.safetensors")
        for name in (run_name, f"{run_name}-whole")
    )
    assert one.keys() == two.keys()
    assert all((one[name] == two[name]).all() for name in one)


async def test_a_newer_learner_takes_over(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(str(tmp_path), run_name)

    async def take_over() -> None:
        runs = bus.key_value(RUNS)
        while (found := await runs.get(run_name)) is None:  # noqa: ASYNC110  # the broker has no event to wait for here
            await asyncio.sleep(0.02)
        assert isinstance(found[0], wire.RunSpec)
        newer = wire.RunSpec(
            **{name: getattr(found[0], name) for name in found[0].__struct_fields__} | {"epoch": 5}
        )
        assert await runs.update(run_name, newer, found[1]) is not None

    taking = asyncio.create_task(take_over())
    with pytest.raises(
        UserError, match="a newer learner took over under epoch 5, this one is epoch 1"
    ):
        await run(bus, broker_url, config, lambda ticket: [])
    await taking
    assert checkpoint.list_checkpoints(tmp_path / run_name / "checkpoints") == []
