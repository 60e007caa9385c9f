"""Joining a run: in any start order, by name or by being the only one, refused with one line,
following the operator.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waits import LONG_S, until

from broker.contract import wire
from broker.contract.streams import CONTROL, RUNS
from broker.errors import BrokerUnreachable, UserError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.jetstream.publish import MESSAGE_ID, store_message
from broker.runtime.presence import Roster
from broker.runtime.process import Member, Stop, Stopped, add_join_options, join
from broker.server.private_server import BrokerServer
from broker.settings import runspec


@pytest.fixture
def own_broker() -> Iterator[str]:
    """A broker on which no other run is."""
    with (
        tempfile.TemporaryDirectory(prefix="rlearner-test-broker-") as folder,
        BrokerServer(folder, store_max_gib=1024) as server,
    ):
        yield server.url


def options(url: str, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_join_options(parser)
    return parser.parse_args(["--broker", url, *arguments])


def spec(run: str, **fields: Any) -> wire.RunSpec:
    return msgspec.structs.replace(
        wire.RunSpec(run=run, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="m"),
        **fields,
    )


@asynccontextmanager
async def connected(url: str, run: str) -> Any:
    bus = await Bus.connect(url, run, name="learner", deadline_s=60)
    await bus.ensure_streams()
    yield bus
    await bus.close()


async def desire(bus: Bus, state: Any) -> None:
    await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state=state))


async def test_epochs_count_up_and_fence(bus: Bus) -> None:
    assert await runspec.publish_runspec(bus, spec(bus.run)) == 1
    assert await runspec.publish_runspec(bus, spec(bus.run)) == 2
    rivals = await asyncio.gather(
        *(runspec.publish_runspec(bus, spec(bus.run, model_path=str(n))) for n in range(4))
    )
    assert sorted(rivals) == [3, 4, 5, 6]  # each incarnation has an epoch of its own
    found = await runspec.wait_for_runspec(bus, bus.run)
    assert (found.epoch, found.model_path) == (6, str(rivals.index(6)))


async def test_who_waits_for_a_run_says_which_there_are(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is misspelt would be waited for for ever."""
    caplog.set_level("INFO")
    await runspec.publish_runspec(bus, spec(bus.run))
    waiting = asyncio.create_task(runspec.wait_for_runspec(bus, "misspelt"))
    await until(
        lambda: "waiting for the learner to start run misspelt; the broker has " in caplog.text
    )
    assert bus.run in caplog.text
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_member_that_comes_first_waits_for_the_learner(bus: Bus, broker_url: str) -> None:
    joined: list[Member] = []

    async def member() -> None:
        async with join(
            "envhub", options(broker_url, "--run", bus.run, "--id", "e1"), Stop()
        ) as one:
            joined.append(one)
            await one.stop.asked.wait()

    task = asyncio.create_task(member())
    await asyncio.sleep(0.6)
    assert joined == []
    await runspec.publish_runspec(bus, spec(bus.run, config={"train": {"steps": 3}}))
    await until(lambda: bool(joined))
    assert (joined[0].id, joined[0].role, joined[0].spec.config, joined[0].bus.run) == (
        "e1",
        "envhub",
        {"train": {"steps": 3}},
        bus.run,
    )
    await desire(bus, "stopped")
    async with asyncio.timeout(LONG_S):
        await task
    assert joined[0].stop.reason == "the run is stopped"


async def test_a_member_follows_the_operator_and_the_learner(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    async with join("rollout", options(broker_url, "--run", bus.run), Stop()) as member:
        assert not member.paused
        await desire(bus, "paused")
        await until(lambda: member.paused)
        await desire(bus, "running")
        async with asyncio.timeout(LONG_S):
            await member.running.wait()
        await desire(bus, "draining")
        await until(lambda: member.desired == "draining")
        assert not member.stop.asked.is_set()  # it serves the hubs until the run is stopped
        await runspec.publish_runspec(bus, spec(bus.run, model_path="resumed"))
        await until(lambda: member.spec.model_path == "resumed")
        assert member.spec.epoch == 2


@pytest.mark.parametrize("named", [True, False])
async def test_a_member_that_waits_outlives_a_store_that_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    first = BrokerServer(str(tmp_path / "first"))
    first.start()
    task = asyncio.create_task(_joined(options(first.url, *(["--run", "r"] if named else []))))
    await until(lambda: "waiting for" in caplog.text)
    first.stop()
    with BrokerServer(str(tmp_path / "second"), port=int(first.url.rpartition(":")[2])):
        await asyncio.sleep(1.0)  # it connects again, to a broker with other keys
        assert not task.done()
        async with connected(first.url, "r") as bus:
            await runspec.publish_runspec(bus, spec("r"))
            async with asyncio.timeout(LONG_S):
                assert await task == ("r", 1)


async def _joined(arguments: argparse.Namespace) -> tuple[str, int]:
    async with join("envhub", arguments, Stop()) as member:
        return member.bus.run, member.spec.epoch


async def test_an_environment_hub_does_not_join_a_run_that_drains(
    bus: Bus, broker_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    await desire(bus, "draining")
    task = asyncio.create_task(_joined(options(broker_url, "--run", bus.run)))
    await until(
        lambda: f"run {bus.run} is draining; waiting for the learner to resume it" in caplog.text
    )
    async with join("rollout", options(broker_url, "--run", bus.run), Stop()):
        assert not task.done()  # servers and reward hubs are needed until the last episode ends
    await desire(bus, "running")
    async with asyncio.timeout(LONG_S):
        await task


def test_a_hub_whose_broker_loses_its_store_ends_with_one_line(tmp_path: Path) -> None:
    server = BrokerServer(str(tmp_path / "first"))
    server.start()
    asyncio.run(_publish_spec(server.url))
    command = [sys.executable, "-m", "rewardhub.cli", "--broker", server.url, "--run", "r"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as hub:
        assert hub.stderr is not None
        lines = iter(hub.stderr)
        assert next(line for line in lines if "joined run r" in line)
        server.stop()
        with BrokerServer(str(tmp_path / "second"), port=int(server.url.rpartition(":")[2])):
            rest = list(lines)
            assert hub.wait(LONG_S) == 1
    assert "Traceback" not in "".join(rest)
    assert rest[-1].startswith("error: ")
    assert rest[-1].endswith(
        "start this process again: it joins the run once the learner is back\n"
    )


async def _publish_spec(url: str) -> None:
    async with connected(url, "r") as bus:
        config = {
            "domains": {"qa": {"env": "qa", "rewards": [{"name": "math_answer"}]}},
            "rewardhub": {"workers": 1},
        }
        await runspec.publish_runspec(bus, spec("r", config=config))


async def test_draining_stops_an_environment_hub(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    async with join("envhub", options(broker_url, "--run", bus.run), Stop()) as member:
        await desire(bus, "draining")
        async with asyncio.timeout(LONG_S):
            await member.stop.asked.wait()


async def test_presence_and_metrics_of_a_member(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    seen: list[wire.Metrics] = []

    async def watch() -> None:
        async for metrics in watch_metrics(bus):
            seen.append(metrics)

    watching = asyncio.create_task(watch())
    async with join(
        "rollout", options(broker_url, "--run", bus.run, "--id", "r1"), Stop()
    ) as member:
        member.announce(
            lambda: wire.Presence(role="rollout", id="r1", host="h", pid=1, state="serving")
        )
        member.report(lambda: {"time/generate": 1.5}, lambda: {"state": "fine"})
        roster = Roster(bus)
        await roster.start()
        await until(lambda: roster.get("r1") is not None)
        member.poke()
        await until(lambda: bool(seen))
        assert (seen[0].id, seen[0].values, seen[0].text) == (
            "r1",
            {"time/generate": 1.5},
            {"state": "fine"},
        )
    await until(lambda: roster.get("r1") is None)  # it said farewell
    await roster.close()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_part_that_fails_stops_the_process_and_is_raised(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))

    def broken() -> dict[str, float]:
        raise KeyError("no such metric")

    async def run() -> None:
        async with join("rollout", options(broker_url, "--run", bus.run), Stop()) as member:
            member.report(broken)
            await member.stop.asked.wait()

    async with asyncio.timeout(LONG_S):
        with pytest.raises(KeyError, match="no such metric"):
            await run()


async def test_the_only_run_that_is_not_stopped_is_found(own_broker: str) -> None:
    found: list[str] = []

    async def member() -> None:
        async with join("rollout", options(own_broker), Stop()) as one:
            found.append(one.bus.run)

    task = asyncio.create_task(member())
    async with (
        connected(own_broker, "old") as learner,
        connected(own_broker, "new") as newer,
        connected(own_broker, "third") as third,
    ):
        await desire(learner, "stopped")
        await runspec.publish_runspec(learner, spec("old"))
        await asyncio.sleep(0.6)
        assert found == []
        await runspec.publish_runspec(newer, spec("new"))
        async with asyncio.timeout(LONG_S):
            await task
        assert found == ["new"]
        await runspec.publish_runspec(third, spec("third"))
        with pytest.raises(
            UserError,
            match=r"several runs on this broker: new, third; choose one with --run or RL_RUN, "
            r"or end one with `rlearner stop`",
        ):
            async with join("rollout", options(own_broker), Stop()):
                pass
        assert await runspec.find_runs(learner) == {
            "old": "stopped",
            "new": "running",
            "third": "running",
        }


async def test_a_stopped_run_is_waited_for_until_it_is_resumed(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    await desire(bus, "stopped")
    epochs: list[int] = []

    async def member() -> None:
        async with join("rollout", options(broker_url, "--run", bus.run), Stop()) as one:
            epochs.append(one.spec.epoch)

    task = asyncio.create_task(member())
    await asyncio.sleep(0.7)
    assert epochs == []
    await runspec.publish_runspec(bus, spec(bus.run))
    await desire(bus, "running")
    async with asyncio.timeout(LONG_S):
        await task
    assert epochs == [2]


async def test_another_wire_version_is_refused_even_with_unknown_fields(
    bus: Bus, broker_url: str
) -> None:
    newer = msgspec.msgpack.encode(
        {"type": "RunSpec", "run": bus.run, "wire_version": wire.WIRE_VERSION + 1, "novelty": 1}
    )
    place = f"{RUNS.key_prefix(bus.run)}{bus.run}"
    headers = {MESSAGE_ID: f"newer-{bus.run}"} | bus.link.login.sign(bus.run, place, newer)
    await store_message(bus.link, RUNS.stream_name(bus.run), place, newer, headers)
    with pytest.raises(
        UserError,
        match=rf"run {bus.run} uses wire version {wire.WIRE_VERSION + 1}, this program {wire.WIRE_VERSION}",
    ):
        async with join("envhub", options(broker_url, "--run", bus.run), Stop()):
            pass
    with pytest.raises(UserError, match="uses wire version"):
        await runspec.publish_runspec(bus, spec(bus.run))
    await bus.key_value(RUNS).delete(bus.run)


async def test_other_data_files_are_refused_to_who_reads_them(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(
        bus, spec(bus.run, data_digests={"/no/such/file.jsonl": "0" * 32})
    )
    with pytest.raises(UserError, match=r"/no/such/file\.jsonl"):
        async with join("envhub", options(broker_url, "--run", bus.run), Stop()):
            pass
    async with join("rollout", options(broker_url, "--run", bus.run), Stop()):
        pass


async def test_a_stop_while_waiting_ends_quietly(bus: Bus, broker_url: str) -> None:
    stop = Stop()
    asyncio.get_running_loop().call_later(0.4, stop.request, "SIGTERM")
    with pytest.raises(Stopped):
        async with join("envhub", options(broker_url, "--run", bus.run), stop):
            pass
    stop = Stop()
    asyncio.get_running_loop().call_later(0.4, stop.request, "SIGTERM")
    with pytest.raises(Stopped):
        async with join("envhub", options("nats://127.0.0.1:1", "--run", bus.run), stop):
            pass


@pytest.mark.parametrize(("name", "value"), [("--run", "a.b"), ("--id", "a b")])
async def test_bad_options(broker_url: str, name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"{name}: '{value}' is not allowed"):
        async with join("envhub", options(broker_url, name, value), Stop()):
            pass


@pytest.mark.parametrize(
    "address",
    [
        "http://x:4222",
        "nats://x:port",
        "localhost",
        "nats://",
        "nats://a:1,http://b",
        "nats://a:1,",
    ],
)
async def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(
        BrokerUnreachable, match=f"{address} is not a broker address; expected nats://host:port"
    ):
        async with join("envhub", options(address), Stop()):
            pass


_MEMBER = """
import argparse, sys
from broker.runtime.process import add_join_options, join, main
parser = argparse.ArgumentParser()
add_join_options(parser)
options = parser.parse_args()
async def body(stop):
    async with join("envhub", options, stop) as member:
        await stop.asked.wait()
sys.exit(main("envhub", body))
"""


def test_an_unreachable_broker_is_one_line_and_exit_code_2_at_the_deadline() -> None:
    command = [
        sys.executable,
        "-c",
        _MEMBER,
        "--broker",
        "nats://127.0.0.1:1",
        "--connect-deadline",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert "WARNING - envhub" in lines[0]
    assert "no broker at nats://127.0.0.1:1" in lines[0]
    assert lines[-1].startswith("error: no broker answered at nats://127.0.0.1:1 within 1 s")
    assert "Traceback" not in done.stderr


async def test_a_process_of_a_run_that_ends_exits_with_zero(bus: Bus, broker_url: str) -> None:
    await runspec.publish_runspec(bus, spec(bus.run))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error",
        "-c",
        _MEMBER,
        "--broker",
        broker_url,
        "--run",
        bus.run,
        stderr=asyncio.subprocess.PIPE,
    )
    assert child.stderr is not None
    async with asyncio.timeout(LONG_S):
        assert b"joined run" in await child.stderr.readline()
        await desire(bus, "stopped")
        rest = await child.stderr.read()
        assert await child.wait() == 0
    assert b"Traceback" not in rest
