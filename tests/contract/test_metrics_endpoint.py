"""``--metrics-port``: what a real process shows about itself, and what it says when it cannot."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from declared_metrics import differences
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from broker.contract import wire
from broker.contract.streams import EPISODES, TICKETS
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.runtime.figures import ProcessFigures, newest_values
from broker.runtime.health import Health
from broker.runtime.metrics_endpoint import MAX_CONNECTIONS, MetricsEndpoint
from broker.runtime.process_collector import LoopLag, ProcessCollector
from broker.system import logs

ROOT = Path(__file__).parents[2]


def get(url: str, accept: str = "") -> tuple[int, str, str]:
    """Return status, content type and body."""
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("run", "quick"), ("role", "envhub"), ("id", "envhub-1")):
        monkeypatch.setitem(logs._identity, name, value)


@pytest.fixture
def endpoint(identity: None) -> Iterator[tuple[MetricsEndpoint, Health, ProcessFigures]]:
    health, figures = Health(), ProcessFigures()
    made = MetricsEndpoint(
        "127.0.0.1", 0, health, ProcessCollector(figures, health, LoopLag()), turns_within_s=0.5
    )
    yield made, health, figures
    made.close()


async def test_a_blocked_event_loop_is_reported(
    endpoint: tuple[MetricsEndpoint, Health, ProcessFigures],
) -> None:
    made, health, _ = endpoint
    health.beat_every_s = 0.1
    beating = asyncio.create_task(health.keep_beating())
    await asyncio.sleep(0.3)
    assert (await asyncio.to_thread(get, f"{made.url}/healthz"))[::2] == (200, "ok\n")
    assert (await asyncio.to_thread(get, f"{made.url}/readyz"))[::2] == (
        503,
        "starting: starting\n",
    )
    health.set("ready", "run quick: 3 of 8 episodes")
    assert (await asyncio.to_thread(get, f"{made.url}/readyz"))[::2] == (
        200,
        "ready: run quick: 3 of 8 episodes\n",
    )
    time.sleep(1.2)  # noqa: ASYNC251 - the event loop stands still while the thread answers
    status, _, text = get(f"{made.url}/healthz")
    assert (status, text) == (503, "the event loop has not turned for 1 s\n")
    assert get(f"{made.url}/readyz")[0] == 503
    assert get(f"{made.url}/metrics")[0] == 200
    await asyncio.sleep(0.3)
    assert (await asyncio.to_thread(get, f"{made.url}/healthz"))[0] == 200
    beating.cancel()


async def test_figures_of_a_process_and_its_streams(
    endpoint: tuple[MetricsEndpoint, Health, ProcessFigures], bus: Bus
) -> None:
    made, health, figures = endpoint
    health.set("ready", "")
    figures.bus, figures.depths = bus, {("tickets", f"rl.{bus.run}.tickets.lake"): 2.0}
    figures.report(
        wire.Metrics(
            role="envhub", id="e", time=1.0, values={"eval/step": 2.0, "eval/success_rate": 0.75}
        )
    )
    figures.report(
        wire.Metrics(
            role="envhub", id="e", time=1.0, values={"envhub/groups": 3.0, "time/generate": 0.5}
        )
    )
    ticket = wire.Ticket(
        number=1, domain="lake", task_index=0, seed=1, min_version=0, max_staleness=1, group_size=2,
        min_group_size=1, deadline_s=10.0,
    )  # fmt: skip
    for number in (1, 2):
        await bus.publish(TICKETS, ticket, key="lake", ticket=number, message_id=f"t{number}")
    queue = await bus.work_queue(TICKETS, "lake")
    first, second = [(await queue.fetch(1, 5.0))[0] for _ in range(2)]
    await second.nak()
    again = (await queue.fetch(1, 5.0))[0]
    assert again.num_delivered == 2
    await asyncio.gather(first.ack(), again.ack())
    _, content_type, text = await asyncio.to_thread(get, f"{made.url}/metrics")
    assert content_type.startswith("text/plain; version=")
    assert differences(parse_text(text)) == []
    found = {(one.name, one.labels.get("stream") or one.labels.get("state")): one for family in parse_text(text)
             for one in family.samples}  # fmt: skip
    values = {key: one.value for key, one in found.items()}
    expected = {
        "published": 2,
        "consumed": 3,
        "redelivered": 1,
        "acknowledged": 2,
        "handed_back": 1,
    }
    assert {
        what: values[f"rlearner_stream_messages_{what}_total", "tickets"] for what in expected
    } == expected
    assert found["rlearner_stream_messages_published_total", "tickets"].labels == {
        "run": "quick", "role": "envhub", "id": "envhub-1", "stream": "tickets",
    }  # fmt: skip
    assert ("rlearner_stream_messages_published_total", EPISODES.name) not in values
    assert values["rlearner_envhub_groups_total", None] == 3
    assert values["rlearner_time_generate_seconds", None] == 0.5
    assert values["rlearner_eval_success_rate", None] == 0.75
    assert found["rlearner_queue_depth", "tickets"].labels == {
        "run": "quick", "stream": "tickets", "subject": f"rl.{bus.run}.tickets.lake",
    }  # fmt: skip
    states = {
        state: values["rlearner_process_state", state]
        for state in ("starting", "ready", "draining", "failed")
    }
    assert states == {"starting": 0, "ready": 1, "draining": 0, "failed": 0}
    assert values["process_resident_memory_bytes", None] > 1 << 20
    assert values["process_open_fds", None] >= 3
    assert values["process_cpu_seconds_total", None] > 0


async def test_openmetrics_is_negotiated(
    endpoint: tuple[MetricsEndpoint, Health, ProcessFigures],
) -> None:
    made, _, figures = endpoint
    figures.report(wire.Metrics(role="envhub", id="e", time=1.0, values={"envhub/groups": 3.0}))
    accept = "application/openmetrics-text; version=1.0.0"
    _, content_type, text = await asyncio.to_thread(get, f"{made.url}/metrics", accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in parse_openmetrics(text)}
    assert families["rlearner_envhub_groups"].type == "counter"
    assert families["rlearner_event_loop_lag_seconds"].type == "histogram"


async def test_lag_is_counted_by_how_late_the_loop_is() -> None:
    lag = LoopLag()
    measuring = asyncio.create_task(lag.measure())
    await asyncio.sleep(0.05)
    time.sleep(0.9)  # noqa: ASYNC251 - what is measured
    await asyncio.sleep(0.3)
    measuring.cancel()
    samples = {
        one.labels.get("le"): one.value
        for one in lag.family({"run": "r"}).samples
        if "bucket" in one.name
    }
    assert samples["0.1"] < samples["2.0"] == samples["+Inf"]
    (total,) = [one.value for one in lag.family({"run": "r"}).samples if one.name.endswith("_sum")]
    assert 0.6 < total < 2.0


async def test_more_connections_than_any_scraper_needs_are_closed(
    endpoint: tuple[MetricsEndpoint, Health, ProcessFigures],
) -> None:
    made = endpoint[0]
    opened = [await asyncio.open_connection("127.0.0.1", made.port) for _ in range(MAX_CONNECTIONS)]
    await asyncio.sleep(0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
    writer.write(b"GET /healthz HTTP/1.0\r\n\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await reader.readexactly(1)
    for _, one in [*opened, (reader, writer)]:
        one.close()
    await asyncio.sleep(0.2)
    assert (await asyncio.to_thread(get, f"{made.url}/healthz"))[0] == 200


def test_what_cannot_be_listened_on_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        text = f"--metrics-port: port {number} on 127.0.0.1 is already in use; choose another, or 0 for any"
        with pytest.raises(UserError, match=f"^{text}$"):
            MetricsEndpoint("127.0.0.1", number, Health())
    with pytest.raises(
        UserError,
        match=r"^--metrics-bind: cannot listen on 203\.0\.113\.7: .*; use an address of this host",
    ):
        MetricsEndpoint("203.0.113.7", 0, Health())
    with pytest.raises(
        UserError, match=r"^--metrics-bind: 'localhost' is not an IP address, such as"
    ):
        MetricsEndpoint("localhost", 0, Health())


def test_values_of_an_evaluation_stay_until_the_next() -> None:
    before = {
        "eval/step": 4.0,
        "eval/success_rate": 0.5,
        "eval/random/success_rate": 0.1,
        "reward/mean": 0.1,
    }
    assert newest_values(before, {"reward/mean": 0.2}) == before | {"reward/mean": 0.2}
    after = {"eval/step": 8.0, "eval/success_rate": 0.5, "eval/random/success_rate": 0.1}
    assert newest_values(before, {"eval/step": 8.0}) == after


COMMANDS = {
    "rollout": ["rollout.cli", "--engine", "random"],
    "envhub": ["envhub.cli", "--n", "4"],
    "rewardhub": ["rewardhub.cli"],
    "broker": ["broker.cli", "serve", "--port", "0"],
    "learner": ["rlearner.cli", "start", "configs/quickstart.yaml"],
}


def test_every_process_serves_while_it_waits(tmp_path: Path) -> None:
    """Without a run to join, a process is alive but not ready; a taken port ends it with 2."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "RL_BROKER": "nats://127.0.0.1:9",
        "RL_RUN": "none",
    }

    def start(role: str, number: str) -> subprocess.Popen[str]:
        (folder := tmp_path / f"{role}-{number}").mkdir()
        command = [sys.executable, "-m", *COMMANDS[role], "--metrics-port", number]
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=nothing, stderr=pipe, text=True
        )

    serving = {role: start(role, "0") for role in COMMANDS}
    try:
        bases = {}
        for role, process in serving.items():
            assert process.stderr is not None
            url = next(
                line.split(" at ")[1].strip() for line in process.stderr if "metrics at " in line
            )
            bases[role] = base = url.removesuffix("/metrics")
            assert get(f"{base}/healthz")[::2] == (200, "ok\n")
            assert f'role="{role}"' in get(url)[2]
        assert {role: get(f"{base}/readyz")[0] for role, base in bases.items() if role != "broker"} == {
            "rollout": 503, "envhub": 503, "rewardhub": 503, "learner": 503,
        }  # fmt: skip
        refused = {role: start(role, base.rpartition(":")[2]) for role, base in bases.items()}
        for role, process in refused.items():
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 2, (role, errors)
            said = [line for line in errors.splitlines() if line.startswith("error: ")]
            assert len(said) == 1
            assert said[0].startswith("error: --metrics-port: port ")
            assert said[0].endswith("is already in use; choose another, or 0 for any")
            assert "Traceback" not in errors
        stopping = {role: process for role, process in serving.items() if role != "learner"}
        for process in stopping.values():
            process.terminate()
        assert {role: process.wait(60) for role, process in stopping.items()} == dict.fromkeys(
            stopping, 0
        )
    finally:
        for process in serving.values():
            process.kill()
            process.communicate()
