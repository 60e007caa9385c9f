"""The table of streams: frozen, consistent, and fit to be subjects."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import docs
from broker.contract import streams, wire
from broker.contract.streams import STREAMS, StreamKind
from broker.errors import ConfigError

GOLDEN = Path(__file__).parent / "test_wire_golden.txt"


def test_the_contract_is_frozen() -> None:
    """Any change of a stream or a field shows here; other programs and stored logs depend on them.

    When it is meant: raise WIRE_VERSION if old messages are no longer read the same way, then run
    ``python -m broker.docs --schema > tests/unit/broker/test_wire_golden.txt``.
    """
    assert "\n".join(docs.schema()) + "\n" == GOLDEN.read_text(encoding="utf-8")


def test_subjects() -> None:
    assert streams.TICKETS.subject("demo", "lake") == "rl.demo.tickets.lake"
    assert streams.TICKETS.all_subjects("demo") == "rl.demo.tickets.*"
    assert streams.SAMPLES.subject("demo") == "rl.demo.samples"
    assert streams.SAMPLES.all_subjects("demo") == "rl.demo.samples"
    assert streams.SAMPLES.stream_name("demo") == "rl_demo_samples"
    assert streams.RUNS.bucket("demo") == "rl_demo_runs"
    assert streams.RUNS.stream_name("demo") == "KV_rl_demo_runs"
    assert streams.RUNS.key_prefix("demo") == "$KV.rl_demo_runs."
    assert streams.PRESENCE.subject("demo", "rollout.r1") == "rl.demo.presence.rollout.r1"
    assert streams.PRESENCE.all_subjects("demo") == "rl.demo.presence.*.*"
    assert streams.PRESENCE.all_subjects("demo", "rollout") == "rl.demo.presence.rollout.*"


def test_names_are_distinct_and_every_message_travels() -> None:
    assert len({stream.name for stream in STREAMS}) == len(STREAMS)
    assert {message for stream in STREAMS for message in stream.messages} == set(wire.MESSAGES)


def test_only_kv_expires_and_only_kept_streams_are_bounded() -> None:
    for stream in STREAMS:
        assert stream.ttl_s == 0 or stream.kind is StreamKind.KV
        assert stream.max_bytes == 0 or stream.kind is StreamKind.LOG


@pytest.mark.parametrize("bad", ["", "a.b", "a b", "*", ">", "a\n", "é", "a" * 65, "../x"])
def test_what_is_no_part_of_a_subject_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError, match="1-64 letters, digits"):
        streams.TICKETS.subject("demo", bad)
    with pytest.raises(ConfigError, match="1-64 letters, digits"):
        streams.SAMPLES.subject(bad)
    with pytest.raises(ConfigError, match="1-64 letters, digits"):
        streams.PRESENCE.subject("demo", f"rollout.{bad}")
    with pytest.raises(ConfigError, match="1-64 letters, digits"):
        streams.PRESENCE.all_subjects("demo", bad or ".")


def test_a_stream_in_memory_is_one_that_every_process_writes_again() -> None:
    """It is gone when the broker restarts, so no promise may depend on it: without attempts a
    deadly ticket kills a few hubs more. Who has a device claims it again, see ``device_party``.
    """
    assert [stream.name for stream in STREAMS if stream.memory] == [
        "attempts",
        "members",
        "devices",
    ]
    assert all(stream.ttl_s for stream in STREAMS if stream.memory)


@given(st.from_regex(wire.NAME, fullmatch=True), st.from_regex(wire.NAME, fullmatch=True))
def test_two_runs_never_share_a_subject(one: str, two: str) -> None:
    for stream in STREAMS:
        if stream.kind is not StreamKind.KV and one != two:
            assert stream.subject(one, "k") != stream.subject(two, "k")
            assert stream.stream_name(one) != stream.stream_name(two)
