"""The model of a run: cases computed by hand, what never may happen, and the command."""

from __future__ import annotations

import io
import json
import math
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from bench.advice.speeds import FleetSpeeds
from bench.advice.virtual_run import run_fleet, settings_of
from broker.contract import wire
from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from learner.prepare import to_yaml
from rlearner.advise import advice, changes
from rlearner.advise.advice import bottleneck_line
from rlearner.advise.fit import HostUse, NotFitted, fit_run
from rlearner.advise.follow import StepHistory
from rlearner.advise.run_model import Lengths, RunModel
from rlearner.advise.simulation import Prediction, simulate
from rlearner.cli import main
from rlearner.ops import status
from rlearner.ops.status import advice_on_disk
from rlearner.up.live_state import LiveRunState
from rlearner.up.view import figures_table

ALIKE = Lengths(((0.0, 100.0),))  # every episode has 100 tokens: 1 s at 0.01 s a token
TWO_STAGES = RunModel(
    groups_per_step=4,
    group_size=1,
    max_staleness=0,
    tokens=ALIKE,
    servers=1,
    slots=64,
    token_s=0.01,
)


@pytest.mark.parametrize(
    ("staleness", "train_s", "step_s"),
    [
        (0, 2.0, 3.0),  # generate 1 s, then train 2 s
        (1, 2.0, 2.0),  # the learner is never idle
        (1, 0.5, 0.75),  # the tickets of two steps are out for 1.5 s: credit is the limit
        (2, 0.5, 0.5),  # of three steps for 1.5 s
        (3, 0.25, 0.3125),  # of four steps for 1.25 s
    ],
)
def test_two_stages_under_bounded_credit(staleness: int, train_s: float, step_s: float) -> None:
    found = simulate(replace(TWO_STAGES, max_staleness=staleness, step_s=train_s))
    assert found.step_s == pytest.approx(step_s, rel=1e-6)
    assert found.samples_per_s == pytest.approx(4 / step_s)


def test_slots_servers_environments_and_rewards_are_limits() -> None:
    """By hand: four episodes of 1 s need two rounds of two slots; of an environment; scores of 0.3
    s one by one.
    """
    few = replace(TWO_STAGES, slots=2)
    assert simulate(few).step_s == pytest.approx(2.0)
    assert simulate(replace(few, servers=2)).step_s == pytest.approx(1.0)
    assert simulate(replace(TWO_STAGES, token_s=0.0, token_each_s=0.01)).step_s == pytest.approx(
        4.0
    )
    assert simulate(replace(TWO_STAGES, envs=2, env_s=0.5)).step_s == pytest.approx(3.0)
    assert simulate(replace(TWO_STAGES, score_s=0.3)).step_s == pytest.approx(1.0 + 4 * 0.3)
    assert simulate(replace(TWO_STAGES, score_s=0.3, workers=4)).step_s == pytest.approx(1.3)
    assert simulate(replace(TWO_STAGES, delay_s=0.5)).step_s == pytest.approx(1.5)
    assert simulate(replace(TWO_STAGES, group_s=0.1, step_s=0.2)).step_s == pytest.approx(
        1.0 + 0.4 + 0.2
    )
    assert simulate(replace(TWO_STAGES, group_size=3, redundancy=1)).samples_per_s == pytest.approx(
        8.0
    )


def test_a_large_run_is_simulated_in_proportion() -> None:
    """64 times as large in everything: the same time, found from a part of it."""
    small = replace(TWO_STAGES, max_staleness=1, slots=4, step_s=0.5, token_each_s=0.001)
    large = replace(
        small, groups_per_step=4 * 2048, servers=2048.0, hubs=2048.0, group_s=small.group_s / 2048
    )
    assert simulate(large).step_s == pytest.approx(simulate(small).step_s, rel=0.02)


models = st.builds(
    RunModel,
    groups_per_step=st.integers(1, 12),
    group_size=st.integers(1, 6),
    max_staleness=st.integers(0, 3),
    tokens=st.tuples(st.floats(1, 200), st.floats(1.0, 4.0)).map(
        lambda p: Lengths(((0, p[0]), (1, p[0] * p[1])), 2e3)
    ),
    servers=st.integers(1, 24).map(float),
    slots=st.integers(1, 32),
    token_s=st.floats(1e-4, 0.1),
    token_each_s=st.floats(0, 0.01),
    turns=st.integers(1, 3).map(float),
    envs=st.integers(1, 64),
    hubs=st.integers(1, 3).map(float),
    env_s=st.floats(0, 2),
    env_spread=st.floats(0, 1),
    score_s=st.floats(0, 0.5),
    scores_early=st.booleans(),
    group_s=st.floats(0, 0.2),
    step_s=st.floats(0, 3),
    kept=st.floats(0.3, 1),
)


@settings(max_examples=12, deadline=None)
@given(models, st.integers(1, 8))
def test_more_servers_never_predict_fewer_samples(model: RunModel, more: int) -> None:
    """Nor do the bounds of the two ends break: the work that the learner and the servers must do at
    least.
    """
    model = replace(model, groups_per_step=min(model.groups_per_step, 6))
    before = advice.samples_per_s(model)
    assert advice.samples_per_s(replace(model, servers=model.servers + more)) >= before
    assert 0 < before < math.inf
    learner_s = model.groups_per_step * model.group_s + model.step_s
    assert simulate(model).step_s >= learner_s * (1 - 1e-6)


def test_a_schedule_that_is_worse_by_chance_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    by_chance = {1: 10.0, 2: 20.0, 3: 30.0, 4: 29.0, 5: 29.5, 6: 31.0, 7: 30.0, 8: 30.0, 10: 29.0}

    def simulated(model: RunModel) -> Prediction:
        return Prediction(1.0, by_chance[int(model.servers)], 1.0, {})

    monkeypatch.setattr(advice, "simulate", simulated)
    found = [
        advice.samples_per_s(replace(TWO_STAGES, servers=float(servers)))
        for servers in range(1, 10)
    ]
    assert found == [10, 20, 30, 30, 30, 31, 31, 31, 31]


def test_a_step_waits_for_the_groups_that_are_due() -> None:
    """With long tails a second step's tickets help less than they would if later groups could pass."""
    speeds = FleetSpeeds(max_staleness=0, median=20, spread=1.0, most=600)
    run, patient = fitted(speeds), run_fleet(replace(speeds, max_staleness=1), 30)[3:28]
    true = sum(32 for _ in patient) / sum(row["time/step"] for row in patient)
    assert advice.predict_change(run, {"max_staleness": 1}).samples_per_s == pytest.approx(
        true, rel=0.2
    )
    passing = simulate(replace(run.model, max_staleness=1, drops_late=True)).samples_per_s
    assert passing > 1.3 * simulate(replace(run.model, max_staleness=1)).samples_per_s


def test_the_grid_of_server_counts_has_no_gap() -> None:
    for servers in range(1, 300):
        low = advice._grid_below(servers)
        assert low <= servers < advice._grid_above(low)
        assert advice._grid_below(low) == low
        assert advice._grid_above(low) <= low * 1.25 + 1


def test_desired_servers() -> None:
    """Ten slots of work in flight at most, two slots each: five servers; the learner alone takes
    longer: one.
    """
    model = replace(TWO_STAGES, groups_per_step=10, slots=2, step_s=0.01)
    assert advice.desired_servers(model) == 5
    assert advice.desired_servers(replace(model, step_s=60.0, max_staleness=1)) == 1


STAGES = {
    "learner": FleetSpeeds(step_s=1.0),
    "generation": FleetSpeeds(slots=4, servers=1),
    "environment": FleetSpeeds(turns=3, median=8, envs=8, env_s=0.1),
    "reward": FleetSpeeds(score_s=0.08),
    "tail": FleetSpeeds(max_staleness=0, median=20, spread=1.2, most=800),
    "staleness": FleetSpeeds(max_staleness=0, step_s=0.3, spread=0.05),
    "filtering": FleetSpeeds(equal_rewards=0.66),
}


@pytest.mark.parametrize("stage", STAGES)
def test_it_names_the_stage_that_a_fleet_is_short_of(stage: str) -> None:
    speeds = STAGES[stage]
    found = advice.advise(run_fleet(speeds, 14), settings_of(speeds, 14))
    assert found.bottleneck == stage, found.relief
    assert found.line.startswith(f"{stage}; ")
    assert found.explained == pytest.approx(1, abs=0.15)


def test_the_line_names_two_changes_of_different_kinds() -> None:
    model = replace(TWO_STAGES, slots=2, max_staleness=1)
    run = fitted(FleetSpeeds(), model=model)
    assert (
        advice.advice_of(run).line == "generation; 2 more servers of this speed: +200 % samples/s"
    )
    # three slots: a step takes 2.05 s; with a second server 1.2 s; with the tickets of two steps
    # 4/3 s
    strict = replace(TWO_STAGES, group_s=0.05, slots=3)
    assert advice.advice_of(replace(run, model=strict)).line == (
        "generation; 1 more server of this speed: +71 % samples/s; or max_staleness 1: +54 %"
    )


def test_filtered_groups_are_replaced_once_the_learner_reads_on() -> None:
    """Records that come while it completes a step wait, as the real ledger makes them wait."""
    patient = FleetSpeeds(equal_rewards=0.66, step_s=0.5, max_staleness=2)
    found = advice.advise(run_fleet(patient, 24), settings_of(patient, 24))
    assert found.explained == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"filter_zero_variance": True}, "had equal rewards"),
        ({"filter_zero_variance": True, "pass_rate": [0.1, 0.9]}, "were filtered"),
        ({"group_filter": "mine"}, "were filtered"),
    ],
)
def test_the_line_says_what_filtering_costs(algorithm: dict[str, Any], reason: str) -> None:
    speeds = STAGES["filtering"]
    rows = run_fleet(speeds, 14)
    config = settings_of(speeds, 14).with_values(
        "algorithm", **{"filter_zero_variance": False} | algorithm
    )
    run = fit_run(rows, config)
    counts = [row["filter/count"] for row in rows[3:12]]
    filtered = round(sum(counts) / len(counts))
    assert filtered > speeds.groups_per_step
    line = advice.advice_of(run).line
    expected = (
        f"filtering; {filtered} of {filtered + 8} groups of a step {reason} and were replaced: "
    )
    assert line.startswith(expected)
    assert "; max_staleness 3: +" in line


def test_groups_that_nothing_replaces_are_not_filtered() -> None:
    """StarPO-S leaves half of each step's groups out, which the metric counts too."""
    speeds = FleetSpeeds()
    rows = [row | {"filter/count": 4.0} for row in run_fleet(speeds, 12)]
    algorithm = {"adv_estimator": "grpo", "pg_variant": "starpo_s", "keep_fraction": 0.5}
    run = fit_run(rows, settings_of(speeds, 12).with_values("algorithm", **algorithm))
    assert (run.filtered, run.model.kept) == (0.0, 1.0)
    assert fit_run(rows, settings_of(speeds, 12)).model.kept == pytest.approx(8 / 12)


def on_host(run: Any, busy: float, *, is_only_host: bool = True, cores: float = 2.0) -> Any:
    return replace(run, host=HostUse(cores, busy, is_only_host))


def test_a_full_machine_is_the_bottleneck_and_no_process_is_advised() -> None:
    run = fitted(FleetSpeeds(slots=4, servers=1))
    advised = advice.advice_of(on_host(run, 0.97))
    assert advised.bottleneck == "machine"
    assert advised.line == (
        "machine; this machine is full: its 2 cores are 97 % busy, so more processes on it, or a "
        "larger max_staleness, add nothing; another host helps"
    )
    assert max(change.gain for change in advised.changes) <= 1 / 0.97 - 1
    # Also where the model explains the run badly, because the cores are measured.
    rough = advice.advice_of(on_host(replace(run, explained=0.5), 1.0, cores=1.0))
    assert rough.line.startswith("machine; this machine is full: its only core is 100 % busy, ")


def test_a_full_machine_names_the_groups_that_it_wastes() -> None:
    run = on_host(fitted(STAGES["filtering"]), 0.95)
    assert advice.advice_of(run).line.endswith(
        "another host helps, or fewer filtered groups: "
        f"{round(run.filtered)} of {round(run.filtered) + 8} groups of a step had equal rewards"
    )


def test_no_gain_exceeds_the_room_of_the_only_host() -> None:
    run = fitted(FleetSpeeds(slots=4, servers=1))
    advised = advice.advice_of(on_host(run, 0.8))
    assert advised.line == "generation; 1 more server of this speed: +25 % samples/s"
    assert max(change.gain for change in advised.changes) == pytest.approx(0.25)
    assert advised.changes[0].samples_per_s == pytest.approx(1.25 * run.samples_per_s)


def test_where_the_learners_host_of_several_is_full_servers_go_to_others() -> None:
    run = fitted(FleetSpeeds(slots=4, servers=1))
    line = advice.advice_of(on_host(run, 0.97, is_only_host=False)).line
    assert line == (
        "generation; 2 more servers of this speed, not on the learner's host: +199 % samples/s"
    )
    assert "not on" not in advice.advice_of(on_host(run, 0.5, is_only_host=False)).line


def test_no_percentage_where_the_model_explains_the_run_badly() -> None:
    run = replace(fitted(FleetSpeeds(slots=4, servers=1)), explained=1.6, step_s=1.2)
    assert advice.advice_of(run).line == (
        "generation; no gains are predicted: a step takes 1.2 s, in the model 0.75 s"
    )
    idle = replace(run, model=replace(run.model, token_s=1e-6, token_each_s=0.0, delay_s=9.0))
    assert "%" not in advice.advice_of(idle).line


def test_the_host_is_read_from_the_metrics() -> None:
    speeds = FleetSpeeds()
    rows = run_fleet(speeds, 12)
    host = {"host/cores": 2.0, "fleet/hosts": 1.0}
    busy = [row | host | {"host/cpu_busy": row["step"] / 100} for row in rows]
    assert fit_run(busy, settings_of(speeds, 12)).host == HostUse(2.0, pytest.approx(0.07), True)
    several = [row | {"fleet/hosts": 2.0} for row in busy]
    assert fit_run(several, settings_of(speeds, 12)).host == HostUse(
        2.0, pytest.approx(0.07), False
    )
    assert fit_run(rows, settings_of(speeds, 12)).host is None


def fitted(speeds: FleetSpeeds, **more: Any) -> Any:
    return replace(fit_run(run_fleet(speeds, 12), settings_of(speeds, 12)), **more)


def test_the_fit_finds_the_speeds_of_a_fleet() -> None:
    speeds = FleetSpeeds(
        groups_per_step=6, servers=2, slots=8, token_s=0.004, token_each_s=0.001, spread=0.7, turns=2, hubs=2, envs=16,
        env_s=0.2, env_spread=0.5, score_s=0.01, workers=3, sample_s=0.003, step_s=0.2,
    )  # fmt: skip
    model = fitted(speeds).model
    assert (model.servers, model.slots, model.hubs, model.envs, model.workers) == (2, 8, 2, 16, 3)
    assert model.token_s == pytest.approx(0.004, rel=0.2)
    assert model.token_each_s == pytest.approx(0.001, rel=0.2)
    assert model.env_s == pytest.approx(0.4, rel=0.1)  # two turns
    assert model.score_s == pytest.approx(0.01, rel=0.05)
    assert model.group_s == pytest.approx(4 * 0.003, rel=0.01)
    assert model.step_s == pytest.approx(0.2, rel=0.01)
    assert model.tokens.mean == pytest.approx(2 * 40 * math.exp(0.7**2 / 2), rel=0.1)


def test_too_few_steps_say_how_many_more() -> None:
    speeds = FleetSpeeds(max_staleness=1)
    rows, config = run_fleet(speeds, 12), settings_of(speeds, 12)
    with pytest.raises(NotFitted, match="needs 6 steps"):
        fit_run([], config)
    with pytest.raises(NotFitted, match="needs 2 more steps of the present fleet"):
        fit_run(rows[:4], config)
    rows[5]["fleet/servers"] = 3.0  # one left since
    with pytest.raises(NotFitted, match="needs 1 more steps of the present fleet"):
        fit_run(rows[:8], config)
    assert fit_run(rows[:9], config).steps == (7, 9)
    del rows[8]["fleet/token_s"]
    with pytest.raises(NotFitted, match="the newest step has no fleet/token_s"):
        fit_run(rows[:9], config)


def test_a_run_that_will_not_make_enough_steps_is_not_told_to_make_more() -> None:
    speeds = FleetSpeeds(max_staleness=1)
    rows, config = run_fleet(speeds, 7), settings_of(speeds, 7)
    too_few = "the run has too few steps: it needs 3 of the present fleet besides its first 3 and its last 2"
    for made in (4, 7):
        with pytest.raises(NotFitted) as caught:
            fit_run(rows[:made], config)
        assert (str(caught.value), caught.value.steps) == (too_few, 0)
    with pytest.raises(NotFitted, match="needs 2 more steps of the present fleet"):
        fit_run(rows[:4], settings_of(speeds, 8))


def test_a_line_without_a_step_is_skipped() -> None:
    rows, config = run_fleet(FleetSpeeds(), 12), settings_of(FleetSpeeds(), 12)
    damaged = [{name: value for name, value in row.items() if name != "step"} for row in rows]
    assert fit_run([*rows[:6], damaged[6], *rows[6:], damaged[-1]], config) == fit_run(rows, config)
    with pytest.raises(NotFitted, match="needs 6 steps"):
        fit_run(damaged, config)


def test_episodes_without_tokens_are_half_a_token_long() -> None:
    rows = [
        row | {name: 0.0 for name in row if "episode_tokens/" in name}
        for row in run_fleet(FleetSpeeds(), 12)
    ]
    assert fit_run(rows, settings_of(FleetSpeeds(), 12)).model.tokens.mean == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("serverz=3", "unknown key 'serverz'; allowed: servers, slots, hubs"),
        ("servers=0", "--simulate servers=0: expected a whole number from 1 to 100000"),
        ("servers=two", "--simulate servers=two: expected a whole number from 1 to 100000"),
        ("servers=1.5", "--simulate servers=1.5: expected a whole number"),
        ("servers", "--simulate servers=: expected a whole number"),
        ("max_staleness=-1", "expected a whole number from 0 to 64"),
        ("max_staleness=65", "expected a whole number from 0 to 64"),
        ("group_size=100000", "expected a whole number from 1 to 1024"),
        ("hubs=100000", "expected a whole number from 1 to 1024"),
        ("learner=nan", "--simulate learner=nan: expected a number from 0.01 to 100000"),
        ("servers=2,servers=3", "servers is given twice"),
        ("", "--simulate '': expected KEY=VALUE,…; KEY is one of servers, slots, hubs"),
        (",", "--simulate ',': expected KEY=VALUE,…; KEY is one of servers, slots, hubs"),
        ("servers=2,", "--simulate 'servers=2,': expected KEY=VALUE,…"),
    ],
)
def test_impossible_changes_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        changes.parse_changes(text)
    assert says in str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a finished run, without a broker."""
    speeds = FleetSpeeds(slots=4, servers=1)
    config = settings_of(speeds, 14).with_values("run", name="past", dir=str(tmp_path)).to_plain()
    place = tmp_path / "past"
    place.mkdir()
    (place / "config.yaml").write_text(to_yaml(config))
    (place / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in run_fleet(speeds, 14))
    )
    return place


def test_the_command_prints_table_and_answer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"] == "generation"
    assert found["relief"]["generation"] == pytest.approx(1.0, abs=0.1)
    assert found["desired_servers"] > 2
    gains = [change["gain"] for change in found["changes"]]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == pytest.approx(2.0, abs=0.2)
    assert found["changes"][0]["changes"] == {"servers": 3}
    assert main(["advise", str(folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        f"run past, steps 4 to 12: {found['samples_per_s']:.1f} samples/s\nbottleneck: generation; "
    )
    assert "1 more server of this speed" in text
    assert main(["advise", str(folder), "--simulate", "servers=2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["now"] == {"servers": 1, "samples_per_s": found["samples_per_s"]}
    assert answer["then"]["samples_per_s"] == pytest.approx(
        found["samples_per_s"] * (1 + answer["gain"])
    )
    assert answer["gain"] == pytest.approx(1.0, abs=0.1)
    assert main(["advise", str(folder), "--simulate", "servers=2"]) == 0
    assert "servers                         1          2" in capsys.readouterr().out


def test_the_command_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(folder), "--simulate", "gpus=2"]) == 2
    assert "unknown key 'gpus'; allowed: servers" in capsys.readouterr().err
    (folder / "metrics.jsonl").write_text("")
    assert main(["advise", str(folder)]) == 2
    assert "run past: needs 6 steps" in capsys.readouterr().err
    (folder / "config.yaml").write_text("run: {name: past}\n")
    assert main(["advise", str(folder)]) == 2
    assert "does not hold all settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        (("train", "max_staleness"), -7, "train.max_staleness: -7 is not allowed"),
        (("train", "max_staleness"), "abc", "train.max_staleness: 'abc' is not allowed"),
        (
            ("domains", "lake", "group_size"),
            0,
            "run past: settings and figures are not those of a run (",
        ),
    ],
)
def test_damaged_settings_are_one_line(
    folder: Path,
    setting: tuple[str, ...],
    value: Any,
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    place = config
    for name in setting[:-1]:
        place = place[name] if name in place else next(iter(place.values()))
    place[setting[-1]] = value
    (folder / "config.yaml").write_text(to_yaml(config))
    assert main(["advise", str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert main(["status", str(folder)]) == 0


def test_damaged_metrics_are_named_and_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:11], "garbage", *lines[11:]]) + "\n")
    says = "metrics.jsonl: line 12 is damaged; it and later lines are not read"
    assert main(["advise", str(folder)]) == 0
    found = capsys.readouterr()
    assert found.err == f"warning: {says}\n"
    assert found.out.startswith("run past, steps 4 to 11: ")
    assert main(["status", str(folder)]) == 0
    assert says in capsys.readouterr().out
    huge = [
        json.dumps(
            {
                name: 1e308 if isinstance(value, float) else value
                for name, value in json.loads(line).items()
            }
        )
        for line in lines
    ]
    words = [
        json.dumps(
            {
                name: str(value) if isinstance(value, float) else value
                for name, value in json.loads(line).items()
            }
        )
        for line in lines
    ]
    for changed, why in (
        (huge, "settings and figures are not those of a run"),
        (words, "the newest step has no "),
    ):
        metrics.write_text("\n".join(changed) + "\n")
        assert main(["advise", str(folder)]) == 2
        assert why in capsys.readouterr().err
        assert main(["status", str(folder)]) == 0
    metrics.unlink()
    metrics.mkdir()
    assert main(["advise", str(folder)]) == 2
    assert "run past: needs " in capsys.readouterr().err


def test_status_and_the_live_view_name_the_bottleneck(folder: Path) -> None:
    speeds = FleetSpeeds(slots=4, servers=1)
    settings = settings_of(speeds, 14)
    config = settings.to_plain()
    found = advice_on_disk(folder, config)
    assert found["bottleneck"] == "generation"
    assert found["line"].startswith("generation; 2 more servers of this speed: +")
    board = LiveRunState("past", 14)
    for row in run_fleet(speeds, 14):
        for seconds in range(2):  # the learner repeats its newest line
            board.take(
                wire.Metrics(role="learner", id="learner", time=0.0, values=row),
                row["step"] + seconds / 2,
            )
    assert board.history.due() == []  # a short run is not worth the seconds that advice takes
    board.history.computed(0.0)
    rows = board.history.due()
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert board.history.due() == []
    board.bottleneck = bottleneck_line(rows, settings)
    assert board.bottleneck == found["line"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(figures_table(board))
    assert f"bottleneck {found['line']}" in " ".join(console.export_text().split())
    (folder / "metrics.jsonl").write_text("")
    assert advice_on_disk(folder, config)["line"] == "not known: needs 6 steps"
    assert advice_on_disk(folder, {"train": {"steps": 4}})["line"].startswith(
        "not known: config.yaml lacks a setting"
    )


def test_status_simulates_after_the_broker_answered_and_off_the_event_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    @asynccontextmanager
    async def connected(*_: object) -> AsyncIterator[tuple[None, str]]:
        order.append("broker")
        yield None, "no broker answered"

    def advised(*given: Any) -> advice.Advice:
        order.append("loop" if threading.current_thread() is threading.main_thread() else "thread")
        return advice.advise(*given)

    monkeypatch.setattr(status, "connect_run", connected)
    monkeypatch.setattr(status, "advise", advised)
    assert main(["status", str(folder), "--json"]) == 0
    assert order == ["broker", "thread"]
    found = json.loads(capsys.readouterr().out)
    assert (found["advice"]["bottleneck"], found["broker_error"]) == (
        "generation",
        "no broker answered",
    )


def test_history_begins_again_when_the_learner_resumes_from_an_earlier_step() -> None:
    history = StepHistory()
    for step in (1, 2, 3, 4):
        history.take({"step": step, "time/step": 1.0})
    history.take({"step": 3, "time/step": 2.0})
    assert history.due() == []
    for step in (4, 5, 6):
        history.take({"step": step, "time/step": 2.0})
    history.take({"step": 7})  # before the first step of this learner
    assert [(row["step"], row["time/step"]) for row in history.due()] == [
        (3, 2.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
    ]


def test_advice_takes_at_most_a_hundredth_of_the_time() -> None:
    history = StepHistory(first_cost_s=1.0)
    for step in range(1, 25):
        history.take({"step": step, "time/step": 4.0})
    assert history.due() == []  # not in the first 100 s
    history.take({"step": 25, "time/step": 4.0})
    assert history.due()
    history.computed(1.0)  # the next one may begin 100 s later, at 200 s
    for step in range(26, 50):
        history.take({"step": step, "time/step": 4.0})
    assert history.due() == []
    history.take({"step": 50, "time/step": 4.0})
    assert len(history.due()) == 50


def test_figures_that_make_no_sense_cost_only_the_line(caplog: pytest.LogCaptureFixture) -> None:
    speeds = FleetSpeeds()
    rows, config = run_fleet(speeds, 12), settings_of(speeds, 12)
    assert bottleneck_line([row | {"time/step": 0.0} for row in rows[:6]], config).startswith(
        "not known: needs "
    )
    assert bottleneck_line(rows, cast(RunSettings, None)) == "not known: AttributeError"
    assert "no advice from these steps" in caplog.text
