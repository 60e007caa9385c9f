"""What a rollout server runs with: section, options, overrides, and what is refused. And its meter."""

from __future__ import annotations

from typing import Any

import pytest

from broker.errors import ConfigError, UserError
from broker.settings.run_settings import RunSettings
from broker.settings.sections import parse
from rollout.checks import check, refuse_sleepless
from rollout.cli import parser
from rollout.config import RolloutSection
from rollout.engines.base import EngineStats
from rollout.interval_metrics import IntervalMetrics
from rollout.server_options import server_section

CONFIG: dict[str, Any] = {
    "rollout": RolloutSection(max_running=16, engine_args={"kv_slots": 20}).model_dump(mode="json"),
    "domains": {"lake": {"env": "frozenlake", "max_context_tokens": 512}},
}


def own(*arguments: str) -> RolloutSection:
    return server_section(RunSettings.of_config(CONFIG), parser().parse_args(arguments))


def test_options_and_overrides_win_over_the_run() -> None:
    section = own(
        "--policy",
        "old",
        "max_running=3",
        "rollout.update_mode=abort",
        "engine_args.kv_slots=9",
        "drain_timeout_s=1.5",
    )
    assert (section.engine, section.policy, section.max_running, section.update_mode) == (
        "hf",
        "old",
        3,
        "abort",
    )
    assert (section.engine_args, section.drain_timeout_s) == ({"kv_slots": 9}, 1.5)
    assert own() == RolloutSection.model_validate(CONFIG["rollout"])


def test_the_http_api_is_off_by_default() -> None:
    assert own().http_port is None
    assert (
        own("--http").http_port,
        own("--http=0", "max_running=3").http_port,
        own("http_port=9").http_port,
    ) == (
        8000,
        0,
        9,
    )
    for wrong in ("x", "70000", "-1", "max_running=3"):
        with pytest.raises(SystemExit):
            own(f"--http={wrong}")


def test_snapshots_are_of_the_actor() -> None:
    section = own("--snapshot", "http://h:1/x", "snapshot_only=true")
    assert (section.snapshot, section.snapshot_only) == ("http://h:1/x", True)
    assert (own().snapshot, own("snapshot=/a b").snapshot, own().snapshot_only) == (
        None,
        "/a b",
        False,
    )
    with pytest.raises(
        ConfigError,
        match=r"rollout.snapshot: 'x' is not allowed; null with rollout.policy old, whose weights never change",
    ):
        own("--policy", "old", "--snapshot", "x")


def test_another_engine_does_not_inherit_arguments() -> None:
    assert own("--engine", "random").engine_args == {}
    assert own("--engine", "random", "engine_args.choices=[left, up]").engine_args == {
        "choices": ["left", "up"]
    }
    assert own("--engine", "hf").engine_args == {"kv_slots": 20}


@pytest.mark.parametrize(
    ("override", "error"),
    [
        (
            "max_running",
            "override 'max_running' is not allowed; write key=value, for example max_running=32",
        ),
        ("=3", "override '=3' is not allowed; write key=value, for example max_running=32"),
        (
            "max_runing=3",
            "rollout.max_runing: 3 is not allowed; unknown key, did you mean 'rollout.max_running'?",
        ),
        (
            "max_running=many",
            "rollout.max_running: 'many' is not allowed; input should be a valid integer",
        ),
        ("max_running=0", "rollout.max_running: 0 is not allowed; input should be greater than 0"),
        (
            "max_running='3'",
            "rollout.max_running: '3' is not allowed; input should be a valid integer",
        ),
        (
            "update_mode=later",
            "rollout.update_mode: 'later' is not allowed; input should be 'keep', 'recompute' or 'abort'",
        ),
        (
            "engine=randm",
            "rollout.engine: 'randm' is not allowed; did you mean 'random'? known: hf, openai, random, sglang, vllm",
        ),
        (
            "engine_args.kv_slot=3",
            "rollout.engine_args.kv_slot: 3 is not allowed; unknown key, did you mean 'rollout.engine_args.kv_",
        ),
        (
            "engine_args.kv_slots=x",
            "rollout.engine_args.kv_slots: 'x' is not allowed; input should be a valid integer",
        ),
        (
            "max_context_tokens=100",
            "domains.lake.max_context_tokens: 512 is not allowed; at most rollout.max_context_tokens (100)",
        ),
        (
            "snapshot_only=true",
            "rollout.snapshot_only: True is not allowed; false without rollout.snapshot",
        ),
        ("engine_args={a", "override 'engine_args={a' is not allowed; "),
    ],
)
def test_what_is_not_allowed_is_one_line(override: str, error: str) -> None:
    with pytest.raises(UserError) as caught:
        own(override)
    assert str(caught.value).startswith(error)
    assert "\n" not in str(caught.value)


def test_plug_ins_by_path_bring_their_own_arguments() -> None:
    section = RolloutSection(engine="mine.py:Engine", engine_args={"anything": 1})
    check(RunSettings(rollout=section))


def test_parse_names_unknown_keys_before_all_others() -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.zzz: 1 is not allowed; unknown key, known here: engine, "
    ):
        parse("rollout", {"max_running": "x", "zzz": 1}, RolloutSection)


def test_the_meter_reads_differences() -> None:
    meter = IntervalMetrics(now=10.0)
    meter.read(
        11.0,
        EngineStats(
            running=1, busy_s=0.5, generated_tokens=100, prefill_tokens=50, prefix_hit_tokens=0
        ),
    )
    meter.answered(0.2)
    meter.answered(0.4)
    later = EngineStats(
        running=2, waiting=3, slots=4, busy_s=2.0, generated_tokens=400, prefill_tokens=150, prefix_hit_tokens=300,
        pause_s=0.1,
        finished={"stop": 7},
    )  # fmt: skip
    values = meter.read(13.0, later)
    assert values == pytest.approx(
        {
            "rollouter/idle_ratio": 0.25,
            "perf/tokens_per_s": 150.0,
            "rollout/running": 2.0,
            "rollout/waiting": 3.0,
            "rollout/slots": 4.0,
            "rollout/requests_per_s": 1.0,
            "rollout/prefix_hit_ratio": 0.75,
            "time/generate": 0.3,
            "time/pause": 0.1,
            "rollout/finished/stop": 7.0,
        }
    )
    idle = meter.read(
        14.0,
        EngineStats(busy_s=2.0, generated_tokens=400, prefill_tokens=150, prefix_hit_tokens=300),
    )
    assert (
        idle["rollouter/idle_ratio"],
        idle["time/generate"],
        idle["rollout/prefix_hit_ratio"],
    ) == (1.0, 0.0, 0.0)


def test_devices_are_shared_only_with_engines_that_leave_them() -> None:
    for engine in ("hf", "vllm", "sglang", "my_package.engine:Mine"):
        refuse_sleepless(engine)
    with pytest.raises(
        UserError,
        match=r"^--share-gpus: engine random cannot free its device for others; these can: hf, ",
    ):
        refuse_sleepless("random")
