"""Traces of tickets: spans of all processes meet in one trace, and cost nothing while they are off."""

from __future__ import annotations

import time

import pytest
from otlp_receiver import OtlpReceiver

from broker.errors import UserError
from broker.runtime.spans import SpanRecorder
from broker.telemetry import traces as traces_module
from broker.telemetry.traces import TicketTraces, open_traces, require_installed, trace_ids


def test_ids_follow_from_run_and_ticket() -> None:
    # for ever
    assert trace_ids("quick", 17) == (0xA189A599CC8F411A94AAD3CE46CF7A74, 0xD332ED5F29FD4E10)
    found = {trace_ids(run, ticket) for run in ("quick", "slow") for ticket in range(1, 100)}
    assert len(found) == 198
    assert all(0 < trace < 1 << 128 and 0 < root < 1 << 64 for trace, root in found)


def test_spans_of_two_processes_meet_below_the_learners(monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        learner, hub = (
            TicketTraces("quick", role, f"{role}-1", 5) for role in ("learner", "envhub")
        )
        learner.granted(10, 1000.0)
        learner.add("grant", 10, 1000.0, 1000.5)
        hub.add("deliver", 10, 1001.0, 1000.9, deliveries=2)  # the broker's clock is ahead
        hub.add("generate", 11, 1001.0, 1002.0)  # not sampled
        spans = SpanRecorder()
        spans.traces = hub
        with spans.work("env_step", ticket=10):
            time.sleep(0.02)
        with spans.work("env_step"):
            pass
        before = time.time()
        learner.end(10, "trained")
        learner.end(11, "trained")
        for one in (learner, hub):
            one.close()
    by_name = {span.name: span for span in receiver.spans}
    assert sorted(by_name) == ["deliver", "env_step", "grant", "ticket"]
    assert len(receiver.spans) == 4
    trace, root = trace_ids("quick", 10)
    assert {span.trace for span in receiver.spans} == {f"{trace:032x}"}
    assert {name: span.parent for name, span in by_name.items()} == {
        "ticket": "", "grant": f"{root:016x}", "deliver": f"{root:016x}", "env_step": f"{root:016x}",
    }  # fmt: skip
    assert by_name["ticket"].span == f"{root:016x}"
    assert (by_name["ticket"].start, by_name["ticket"].attributes) == (
        1000.0, {"rlearner.ticket": 10, "rlearner.outcome": "trained"},
    )  # fmt: skip
    assert before <= by_name["ticket"].end <= time.time()
    assert (by_name["grant"].start, by_name["grant"].end, by_name["grant"].service) == (
        1000.0,
        1000.5,
        "rlearner-learner",
    )
    assert (by_name["deliver"].start, by_name["deliver"].end) == (1001.0, 1001.0)
    assert by_name["deliver"].attributes == {"rlearner.ticket": 10, "rlearner.deliveries": 2}
    assert 0.02 <= by_name["env_step"].end - by_name["env_step"].start < 1.0
    assert abs(by_name["env_step"].end - time.time()) < 5


def test_a_collector_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(traces_module, "CLOSE_WITHIN_S", 0.2)
    traces = TicketTraces("quick", "learner", "learner", 1)
    began = time.monotonic()
    for number in range(1, 3000):
        traces.add("grant", number, 1.0, 2.0)
    assert time.monotonic() - began < 5
    began = time.monotonic()
    traces.close()
    assert time.monotonic() - began < 1.5


def test_off_is_free_and_without_the_packages_it_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert open_traces(0, "quick", "envhub", "e") is None
    monkeypatch.setattr(traces_module, "find_spec", lambda name: None)
    assert open_traces(3, "quick", "envhub", "e") is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(
        UserError, match=r"^telemetry\.traces: OpenTelemetry is not installed; pip install"
    ):
        require_installed()
