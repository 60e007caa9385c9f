"""Alerts and dashboards on the scrapes of a real run: nothing fires while it is well, and each
alert for what it names.

A second of the run counts as a minute, so that ranges of minutes are over soon. With RL_ALERTS=1,
as in `make test-alerts`, a real Prometheus evaluates the same rules at the same pace, and more is
provoked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import chaos_run as chaos
import promql
import pytest
import yaml
from declared_metrics import differences
from otlp_receiver import OtlpReceiver, ReceivedSpan
from prometheus_client.parser import text_string_to_metric_families
from promql import History, Series, evaluate, parse_scrape

from bench.support.fleet import RunFleet, RunProcess, free_port
from broker.contract.streams import TICKETS
from broker.jetstream.bus import Bus
from broker.system.children import spawn
from broker.telemetry.page_metrics import PAGE_METRICS
from broker.telemetry.traces import trace_ids

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yaml"
BOARDS = ROOT / "deploy/grafana"
WHOLE = os.environ.get("RL_ALERTS") == "1"
PACE = 60.0  # seconds of a rule in a second of the test
RUN = "alerts"
HOPS = ("grant", "deliver", "generate", "env_step", "consume", "train", "weights")
TRACED = 3  # each third ticket: both domains take turns
BASELINE = {"every_steps": 2, "tasks": 2, "baseline": "random"}
REWARD = '''"""A reward that fails for half of the questions or for all, or is slow, if a file says so."""

import time
from pathlib import Path


def length(sample):
    mode = (Path(__file__).parent / "pace").read_text()
    time.sleep(0.5 if mode == "slow" else 0.0)
    if mode == "all" or (mode == "half" and int(sample.reference) % 4 == 0):
        raise ValueError("made to fail")
    return min(1.0, len(sample.response) / 8)
'''
# May be above their thresholds for a while in a run of this size; their time is what makes them
# alerts.
MOODS = {
    "RlearnerLearnerIdle",
    "RlearnerStalenessAtBound",
    "RlearnerNoProgress",
    "RlearnerQueueGrowing",
    "RlearnerQueueStands",
}


def rules() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def board(name: str) -> dict[str, Any]:
    return json.loads((BOARDS / f"{name}.json").read_text())  # type: ignore[no-any-return]


def queries(name: str) -> list[str]:
    """Return the queries of a dashboard, for the run of the test."""
    panels = [panel for panel in board(name)["panels"] if panel["type"] != "row"]
    return [target["expr"].replace("$run", RUN) for panel in panels for target in panel["targets"]]


class Observer:
    """Scrapes the exporter, and a Prometheus next to it if there is one."""

    def __init__(self, url: str, prometheus: str = "") -> None:
        self.url, self.prometheus = url, prometheus
        self.history = History([])
        self._began = time.monotonic()

    async def scrape(self) -> Series:
        text = await asyncio.to_thread(_read, self.url)
        assert differences(text_string_to_metric_families(text)) == []
        self.history.scrapes.append(((time.monotonic() - self._began) * PACE, parse_scrape(text)))
        return self.history.scrapes[-1][1]

    async def until(self, condition: Callable[[Series], Any], within_s: float, what: str) -> Series:
        deadline = time.monotonic() + within_s
        while not condition(series := await self.scrape()):
            assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
            await asyncio.sleep(0.5)
        return series

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Return the labels for which the expression of each alert has a value now."""
        found = {name: evaluate(rule["expr"], self.history) for name, rule in rules().items()}
        return {
            name: [dict(labels) for labels in vector] for name, vector in found.items() if vector
        }

    async def expect(self, alert: str, within_s: float, **labels: str) -> None:
        """Wait until an alert fires for these labels, in Prometheus too."""

        def fires(_: Series) -> bool:
            return any(labels.items() <= found.items() for found in self.firing().get(alert, []))

        await self.until(fires, within_s, alert)
        deadline = time.monotonic() + 60
        while self.prometheus:
            answer = json.loads(await asyncio.to_thread(_read, f"{self.prometheus}/api/v1/alerts"))
            for one in answer["data"]["alerts"]:
                if (
                    one["state"] == "firing"
                    and one["labels"]["alertname"] == alert
                    and labels.items() <= one["labels"].items()
                ):
                    return
            assert time.monotonic() < deadline, (
                f"{alert} does not fire in Prometheus: {answer['data']['alerts']}"
            )
            await asyncio.sleep(0.5)


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


def at_pace(text: str) -> str:
    """Return rules whose minutes are seconds."""
    return re.sub(r"\b(\d+)m\b", r"\1s", text)


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[str]:
    """Run a Prometheus that scrapes the exporter every second."""
    (folder / "rules.yaml").write_text(at_pace(RULES.read_text()))
    jobs = [
        {
            "job_name": "run",
            "static_configs": [{"targets": [target.removeprefix("http://").partition("/")[0]]}],
        }
    ]
    fast = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = {"global": fast, "rule_files": ["rules.yaml"], "scrape_configs": jobs}
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "prometheus.log").open("wb") as log:
        child = spawn(command, log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        child.wait(30)


async def exporter(fleet: RunFleet, folder: Path) -> str:
    """Start the exporter and return its address."""
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "exporter",
        RUN,
        "--broker",
        fleet.url,
        "--metrics-port",
        "0",
    ]
    child = fleet.start(
        RunProcess(
            "exporter",
            "exporter",
            [*command, "--dir", str(folder / "runs")],
            fleet.folder / "e.log",
        )
    )
    deadline = time.monotonic() + 60
    while not (
        found := re.search(r"metrics at (\S+)", child.log.read_text() if child.log.exists() else "")
    ):
        assert time.monotonic() < deadline, "the exporter says no address"
        await asyncio.sleep(0.1)
    return found[1]


def end(child: RunProcess) -> None:
    """Kill a process that stays away."""
    child.done = True
    child.kill()


@pytest.mark.timeout(600)
async def test_alerts_fire_for_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also: each traced ticket is one trace of all hops, which the same run shows."""
    sections: dict[str, Any] = {
        "eval": BASELINE,
        "broker": {"store_max_gib": 4.0},
        "telemetry": {"traces": TRACED},
    }
    if WHOLE:  # enough tickets at once for a queue to grow
        sections["train"] = {"groups_per_step": 16}
    config = chaos.config(tmp_path, RUN, steps=100_000, pace_s=0.02, **sections)
    file = chaos.write(tmp_path, config)
    (tmp_path / "length_reward.py").write_text(REWARD)
    async with AsyncExitStack() as stack:
        receiver = stack.enter_context(OtlpReceiver())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")
        fleet = await stack.enter_async_context(RunFleet(tmp_path / "fleet", RUN))
        chaos.start_all(fleet, file, each=1)
        fleet.add(
            "rollout", "random-0", "--gpus", "cpu", "--engine", "random", "--policy", "random"
        )
        target = await exporter(fleet, tmp_path)
        address = await stack.enter_async_context(prometheus(tmp_path, target)) if WHOLE else ""
        seen = Observer(target, address)
        healthy = await seen.until(_is_under_way, 240, "an evaluation and four steps")
        assert seen.firing().keys() <= MOODS
        ended = {span.trace for span in list(receiver.spans) if span.name == "ticket"}
        for _ in range(60):  # each process sends its spans by itself
            traces = {trace: spans for trace, spans in receiver.traces().items() if trace in ended}
            if all({span.name for span in spans} >= {*HOPS} for spans in traces.values()):
                break
            await asyncio.sleep(0.5)
        _check_traces(traces)
        await _provoke(fleet, seen, tmp_path)
        _check_names(seen, healthy)
    assert fleet.crashes == []


def _is_under_way(found: Series) -> bool:
    needed = {"rlearner_eval_policy_success_rate", "rlearner_processes", "rlearner_step"}
    return found.keys() >= needed and max(found["rlearner_step"].values()) >= 4


def _check_traces(traces: dict[str, list[ReceivedSpan]]) -> None:
    """Each traced ticket is one trace, in which every hop of its way stands below the learner's
    root span.
    """
    whole = {trace: {span.name: span for span in spans} for trace, spans in traces.items()}
    trained = {trace: spans for trace, spans in whole.items() if "ticket" in spans}
    assert len(trained) >= 2
    scored = 0
    for trace, spans in trained.items():
        ticket = spans["ticket"].attributes["rlearner.ticket"]
        wanted, root = trace_ids(RUN, ticket)
        assert (trace, spans["ticket"].span) == (f"{wanted:032x}", f"{root:016x}")
        assert ticket % TRACED == 0
        assert {span.parent for span in traces[trace]} == {"", f"{root:016x}"}
        assert spans.keys() - {"reward"} == {"ticket", *HOPS}
        starts = [spans[name].start for name in ("grant", "generate", "consume")]
        assert starts == sorted(starts)
        assert spans["train"].attributes["rlearner.step"] >= 1
        services = {name: spans[name].service for name in ("grant", "generate", "train")}
        assert services == {
            "grant": "rlearner-learner",
            "generate": "rlearner-envhub",
            "train": "rlearner-learner",
        }
        if "reward" in spans:  # only the domain sums has one
            scored += 1
            assert spans["reward"].service == "rlearner-rewardhub"
            assert (
                spans["generate"].start
                <= spans["reward"].start
                <= spans["reward"].end
                <= spans["consume"].end
            )
    assert scored


async def _provoke(fleet: RunFleet, seen: Observer, folder: Path) -> None:
    bus = await Bus.connect(fleet.url, RUN, name="test", deadline_s=60)
    await bus.link.send(TICKETS.subject(RUN, "lake"), b"\xff no message")
    await bus.close()
    await seen.expect("RlearnerDeadLetters", 60, run=RUN, stream="tickets")
    (folder / "pace").write_text("half")
    await seen.expect("RlearnerGroupsFailing", 150, run=RUN)
    if WHOLE:
        (folder / "pace").write_text("all")
        await seen.expect("RlearnerProcessTakesNoWork", 60, run=RUN, role="rewardhub")
        (folder / "pace").write_text("slow")
        await seen.expect("RlearnerLearnerIdle", 90, run=RUN)
        (folder / "pace").write_text("none")
        await seen.until(
            lambda _: "RlearnerProcessTakesNoWork" not in seen.firing(), 120, "the hub works again"
        )
        depth = f'sum by (run) (rlearner_queue_depth{{run="{RUN}", stream="episodes"}}) < 5'
        await seen.until(lambda _: evaluate(depth, seen.history), 120, "the queue is short again")
        (hub,) = fleet.of("rewardhub")
        hub.freeze()
        await seen.expect("RlearnerQueueGrowing", 60, run=RUN, stream="episodes")
        await seen.expect("RlearnerQueueStands", 60, run=RUN, stream="episodes")
        await seen.expect("RlearnerNoProgress", 90, run=RUN)
        hub.thaw()
    for server in fleet.of("rollout"):
        end(server)
    (learner,) = fleet.of("learner")
    end(learner)
    await seen.expect("RlearnerNoLearner", 60, run=RUN)
    await seen.expect("RlearnerNoServer", 60, run=RUN)
    fleet.kill_broker()
    await seen.expect("RlearnerExporterDown", 60, run=RUN)


def _check_names(seen: Observer, healthy: Series) -> None:
    """Every metric that a dashboard or an alert names was in a scrape, and every query is
    understood.
    """
    known = {name for _, series in seen.history.scrapes for name in series}
    for name in ("run", "fleet", "broker"):
        for query in queries(name):
            assert promql.names_in(query) <= known, query
            evaluate(query, seen.history)
    for alert, rule in rules().items():
        assert promql.names_in(rule["expr"]) <= known, alert
    declared = {
        f"rlearner_{metric.name}{'_total' if metric.kind == 'counter' else ''}"
        for metric in PAGE_METRICS.values()
        if "exporter" in metric.sources
    }
    # A busy machine may not make the steps that the advice needs.
    assert declared - known <= {"rlearner_desired_servers"}
    single = History([(0.0, healthy)])
    assert evaluate(f'rlearner_processes{{run="{RUN}", role="rollout"}}', single).popitem()[1] == 2


def test_every_alert_fires_in_some_test() -> None:
    """Those that `_provoke` provokes, in full or in CI, and those on a changed scrape."""
    provoked = set(re.findall(r'seen\.expect\("(\w+)"', inspect.getsource(_provoke)))
    assert provoked | RARE.keys() == rules().keys()


def changed(series: Series, name: str, value: Callable[[float], float], **labels: str) -> Series:
    """Return a scrape in which the series of one name have other values."""
    own = {
        key: value(old) if labels.items() <= dict(key).items() else old
        for key, old in series[name].items()
    }
    return {**series, name: own}


RARE = {
    "RlearnerWeightTransfersFail": ("rlearner_weights_failures_total", lambda old: old + 3),
    "RlearnerStoreNearlyFull": ("rlearner_jetstream_store_bytes", lambda old: 0.9 * 2**30),
    "RlearnerDiskNearlyFull": ("rlearner_disk_free_bytes", lambda old: 1e9),
    "RlearnerStalenessAtBound": ("rlearner_staleness_mean", lambda old: 1.95),
    "RlearnerLearnerIdle": ("rlearner_trainer_idle_ratio", lambda old: 0.9),
    "RlearnerProcessTakesNoWork": ("rlearner_member_problem", lambda old: 1.0),
    "RlearnerQueueGrowing": ("rlearner_queue_depth", lambda old: old + 5),
    "RlearnerQueueStands": ("rlearner_queue_pending", lambda old: 3.0),
}
SCRAPE = """
rlearner_exporter_up{run="r"} 1
rlearner_processes{run="r",role="learner"} 1
rlearner_processes{run="r",role="rollout"} 1
rlearner_run_desired{run="r",state="running"} 1
rlearner_run_max_staleness{run="r"} 2
rlearner_step{run="r",role="learner",id="learner"} 7
rlearner_trainer_idle_ratio{run="r",role="learner",id="learner"} 0.3
rlearner_staleness_mean{run="r",role="learner",id="learner"} 0.7
rlearner_ticket_dead_total{run="r",role="learner",id="learner"} 2
rlearner_ticket_issued_total{run="r",role="learner",id="learner"} 90
rlearner_weights_failures_total{run="r",role="rollout",id="a"} 1
rlearner_queue_depth{run="r",stream="episodes",subject="rl.r.episodes.cpu.*"} 2
rlearner_queue_pending{run="r",stream="episodes",subject="rl.r.episodes.cpu.*"} 0
rlearner_dead_letters{run="r",stream="tickets"} 0
rlearner_member_problem{run="r",role="envhub",id="e"} 0
rlearner_jetstream_store_bytes{run="r"} 1000
rlearner_jetstream_store_limit_bytes{run="r"} 1073741824
rlearner_disk_free_bytes{run="r",role="learner",id="learner"} 4e11
rlearner_disk_size_bytes{run="r",role="learner",id="learner"} 8e11
"""


@pytest.mark.parametrize("alert", RARE)
def test_rare_conditions(alert: str) -> None:
    """What cannot be provoked in a moment, on a scrape that is changed."""
    name, value = RARE[alert]
    before = parse_scrape(SCRAPE)
    well = History([(0.0, before), (300.0, changed(before, "rlearner_step", lambda old: old + 1))])
    assert {one for one, rule in rules().items() if evaluate(rule["expr"], well)} == set()
    ill = History([*well.scrapes, (400.0, changed(well.scrapes[-1][1], name, value))])
    if alert == "RlearnerQueueStands":
        ill = History([(at, changed(series, name, value)) for at, series in ill.scrapes])
    assert {one for one, rule in rules().items() if evaluate(rule["expr"], ill)} == {alert}


def test_every_alert_has_a_time_a_severity_and_an_entry_in_the_docs() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    for name, rule in rules().items():
        assert re.fullmatch(r"\d+m", rule["for"]), name
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"]
        assert f"`{name}`" in text, f"{name} is not in docs/metrics.md"


@pytest.mark.parametrize("name", ["run", "fleet", "broker"])
def test_dashboards_are_those_of_their_table(name: str) -> None:
    made = subprocess.run(
        [sys.executable, "-c", f"import dashboards, sys; sys.stdout.write(dashboards.text_of({name!r}))"],
        cwd=BOARDS, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (BOARDS / f"{name}.json").read_text() == made.stdout, (
        "run python deploy/grafana/dashboards.py"
    )
    made_board = board(name)
    variables = {one["name"]: one["type"] for one in made_board["templating"]["list"]}
    assert variables == {"source": "datasource", "run": "query"}
    panels = made_board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(
        panel["datasource"]["uid"] == "${source}" for panel in panels if panel["type"] != "row"
    )
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in panels]
    assert len(set(places)) == len(places)
    assert all(
        'run="$run"' in target["expr"] for panel in panels for target in panel.get("targets", ())
    )


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed; make test-alerts installs it"
)
def test_promtool_accepts_rules_and_queries(tmp_path: Path) -> None:
    subprocess.run(["promtool", "check", "rules", str(RULES)], check=True, capture_output=True)
    every = [query for name in ("run", "fleet", "broker") for query in queries(name)]
    groups = [
        {
            "name": "q",
            "rules": [{"record": f"q:{n}", "expr": query} for n, query in enumerate(every)],
        }
    ]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": groups}))
    subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "queries.yaml")],
        check=True,
        capture_output=True,
    )
