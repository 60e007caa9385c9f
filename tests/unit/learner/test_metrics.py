"""A step's figures by hand, and the file they stand in."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from broker.contract import wire
from learner.credit.ledger import GroupArrival, Ledger, TicketEnd
from learner.credit.ticket_rules import DomainRule, TicketRules
from learner.reporting import metrics
from learner.reporting.fleet_figures import fleet_figures
from learner.reporting.metrics import (
    MetricsFile,
    count_tickets,
    evaluations_since,
    finite_values,
    read_lines,
    step_metrics,
    step_of,
    values_by_step,
)


def trajectory(
    episode: int,
    reward: float,
    runs: list[int],
    turns: list[tuple[bool, str]],
    *,
    success: bool = False,
    metrics: dict[str, float] | None = None,
) -> wire.Trajectory:
    """Three tokens of prompt and sum(runs[1::2]) sampled ones."""
    sampled = sum(runs[1::2])
    return wire.Trajectory(
        episode=episode,
        token_ids=wire.column([5] * (3 + sampled), "<i4"),
        loss_mask=wire.column([0] * 3 + [1] * sampled, "|u1"),
        logprobs=wire.column([0.0] * 3 + [-1.0] * sampled, "<f4"),
        version_runs=wire.column(runs, "<i4"),
        turns=[
            wire.Turn(
                start=3 + i, end=4 + i, reward=0.0, valid=valid, finish_reason=reason, server="s"
            )  # type: ignore[arg-type]
            for i, (valid, reason) in enumerate(turns)
        ],
        reward=reward,
        reward_parts={"env": reward / 2, "format": reward / 2},
        success=success,
        end="terminated",
        metrics=metrics or {},
    )


def group(domain: str, trajectories: list[wire.Trajectory], **more: Any) -> wire.Group:
    given = {
        "ticket": 1,
        "task_index": 0,
        "min_version": 0,
        "hub": "h",
        "deliveries": 1,
        "pools": [],
    }
    return wire.Group(**{**given, **more}, domain=domain, trajectories=trajectories)


def test_a_step_by_hand() -> None:
    stop, cut = (True, "stop"), (False, "length")
    lake = group(
        "lake",
        [
            trajectory(0, 1.0, [4, 2, 5, 2], [stop, stop], success=True, metrics={"moves": 2.0}),
            trajectory(1, 0.0, [3, 1, 5, 1], [cut], metrics={"moves": 4.0, "falls": 1.0}),
        ],
        generate_s=2.0,
        env_step_s=0.5,
        env_step_max_s=0.75,
    )
    math_ = group(
        "math",
        [trajectory(0, -1.0, [5, 6], [stop]), trajectory(1, -1.0, [5, 8], [cut])],
        reward_s=1.0,
    )
    values = step_metrics([lake, math_], version=5)
    expected = {
        "reward/mean": -0.25,
        "reward/max": 1.0,
        "reward/min": -1.0,
        "reward/lake/mean": 0.5,
        "reward/math/mean": -1.0,
        "reward_parts/env/mean": -0.125,
        "reward_parts/format/mean": -0.125,
        "frac_reward_zero_std": 0.5,
        "env/success_rate": 0.25,
        "env/domain/lake/success_rate": 0.5,
        "env/domain/math/success_rate": 0.0,
        "env/moves": 3.0,
        "env/falls": 1.0,
        "env/valid_action_rate": 3 / 5,
        "env/num_turns": 5 / 4,
        "response_length/mean": (4 + 2 + 6 + 8) / 4,
        "response_length/max": 8.0,
        "response_length/clip_ratio": 0.5,
        # the turns of its episodes: 2, 1; 1, 1
        "episode_tokens/mean": 1.25,
        "episode_tokens/min": 1.0,
        "episode_tokens/p25": 1.0,
        "episode_tokens/p50": 1.0,
        "episode_tokens/p75": 1.25,
        "episode_tokens/p90": 1.7,
        "episode_tokens/p99": 1.97,
        "episode_tokens/max": 2.0,
        "episode_tokens/group_max": 1.5,
        "staleness/mean": (2 * 1 + 1 * 2) / 20,
        "staleness/max": 2.0,
        "time/generate": 1.0,
        "time/env_step": 0.25,
        "time/env_step_max": 0.375,
        "time/reward": 0.5,
    }
    assert values == pytest.approx(expected)


def test_an_episode_in_several_trajectories_counts_once() -> None:
    parts = [
        trajectory(0, 1.0, [0, 2], [(True, "stop")], success=True),
        trajectory(0, 1.0, [0, 3], [(True, "stop")], success=True),
    ]
    other = trajectory(1, 0.0, [0, 1], [(True, "stop")])
    values = step_metrics([group("lake", [*parts, other])], version=0)
    assert values["reward/mean"] == 0.5
    assert values["env/success_rate"] == 0.5
    assert values["env/num_turns"] == 1.5
    assert values["response_length/mean"] == 2.0


def test_a_step_without_a_sampled_token() -> None:
    values = step_metrics([group("lake", [trajectory(0, 0.0, [], [])])], version=3)
    assert (values["staleness/mean"], values["staleness/max"], values["env/valid_action_rate"]) == (
        0.0,
        0.0,
        0.0,
    )


def test_tickets_and_what_is_on_the_way() -> None:
    lake = DomainRule("lake", 1.0, 2, 2, 1.0)
    ledger = Ledger(
        TicketRules(
            steps=4, groups_per_step=2, max_staleness=1, on_late="wait", seed=0, domains=(lake,)
        )
    )
    ledger.open_credit()
    ledger.apply(GroupArrival(1, 0, (0.0, 1.0)), 1)
    ledger.apply(TicketEnd(2, "late"), 2)
    ledger.apply(TicketEnd(3, "env_error"), 3)
    ledger.apply(TicketEnd(3, "env_error"), 4)
    assert count_tickets(ledger) == {
        "ticket/issued": 6,
        "ticket/trained": 0,
        "ticket/filtered": 0,
        "ticket/dropped": 1,
        "ticket/dead": 1,
        "ticket/open": 4,
        "ticket/duplicate": 1,
        "ticket/unknown": 0,
        "ticket/closed_env_error": 1,
        "ticket/closed_late": 1,
        "off_policy/dropped": 1,
        "off_policy/in_flight": 3,
        "off_policy/in_queue": 1,
    }


def test_a_resumed_run_writes_its_later_lines_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (1, 2, 3):
        file.write({"step": step, "reward/mean": step / 2})
    file.close()
    with path.open("a") as torn:
        torn.write('{"step": 4, "rew')
    again = MetricsFile(path, last_step=2)
    again.write({"step": 3, "reward/mean": 9.0})
    again.close()
    assert read_lines(path) == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 1.0},
        {"step": 3, "reward/mean": 9.0},
    ]
    assert path.read_text().count("\n") == 3


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_the_line_to_go_on_behind_is_found_from_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """What an older part of the file holds is not read: it costs nothing, and is left alone."""
    monkeypatch.setattr(metrics, "BLOCK_BYTES", block)
    path = tmp_path / "metrics.jsonl"
    rows = [b'{"step": %d}\n' % step for step in range(1, 8)]
    for torn in (b"", b'{"step": 8', b"\x00\x00\n", b"[]\n7\n{}\n"):
        for last_step in range(8):
            path.write_bytes(b"".join(rows) + torn)
            MetricsFile(path, last_step).close()
            assert path.read_bytes() == b"".join(rows[:last_step])
    path.write_bytes(b"gibberish\n" + b"".join(rows))
    MetricsFile(path, 5).close()
    assert path.read_bytes() == b"gibberish\n" + b"".join(rows[:5])


def test_an_earlier_incarnation_writes_its_metrics_into_the_void(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    earlier = MetricsFile(path)
    earlier.write({"step": 1})
    file = MetricsFile(path, last_step=1)
    earlier.write({"step": 2, "who": "earlier"})
    file.write({"step": 2})
    earlier.close()
    file.close()
    assert read_lines(path) == [{"step": 1}, {"step": 2}]


def test_evaluation_belongs_to_the_step_after_which_it_began(tmp_path: Path) -> None:
    line = {
        "step": 4,
        "time": 9.0,
        "reward/mean": 0.5,
        "eval/step": 0.0,
        "eval/success_rate": 0.25,
        "eval/domain/lake/success_rate": 0.25,
        "eval/random/step": 1.0,
        "eval/random/success_rate": 0.125,
    }
    assert values_by_step(line) == {
        4: {"reward/mean": 0.5},
        0: {
            "eval/step": 0.0,
            "eval/success_rate": 0.25,
            "eval/domain/lake/success_rate": 0.25,
        },
        1: {"eval/random/step": 1.0, "eval/random/success_rate": 0.125},
    }
    # of `rlearner sft`
    assert step_of({"step": 3, "eval/loss": 0.5}, "eval/loss") == 3
    path = tmp_path / "metrics.jsonl"
    assert evaluations_since(path, 0) == set()
    later = {"step": 13, "eval/step": 10.0, "eval/success_rate": 0.5}
    rows = [line, {"step": 5}, later, {"step": 14}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "damaged\n")
    assert evaluations_since(path, 4) == {("actor", 0), ("random", 1), ("actor", 10)}
    assert evaluations_since(path, 5) == {("actor", 10)}


def test_a_line_is_json_of_finite_numbers(tmp_path: Path) -> None:
    assert finite_values({"a": 1.0, "b": math.nan, "c": math.inf}) == {"a": 1.0}
    file = MetricsFile(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"step": 1, "a": math.nan})
    file.close()
    assert json.dumps(read_lines(tmp_path / "metrics.jsonl")) == "[]"


def test_the_fleet_by_hand() -> None:
    """Servers of other policies, and processes that do not serve, do not count; the unmeasured have
    no speed.
    """

    def process(role: str, name: str, **more: Any) -> wire.Presence:
        return wire.Presence(
            **{"role": role, "id": name, "host": "h", "pid": 1, "state": "serving", **more}
        )

    servers = [
        process("rollout", "a", slots=8, base_s=0.01, each_s=0.001),
        process("rollout", "b", slots=16, base_s=0.03, each_s=0.003),
        process("rollout", "new", slots=4),
        process("rollout", "late", slots=8, base_s=9.0, state="starting"),
        process("rollout", "other", slots=8, base_s=9.0, policy="random"),
    ]
    assert fleet_figures("rollout", servers) == pytest.approx(
        {
            "fleet/servers": 3,
            "fleet/server_slots": 28,
            "fleet/token_s": 0.02,
            "fleet/token_each_s": 0.002,
        }
    )
    scorers = [
        process("rewardhub", "a", slots=16, at_once=2),
        process("rewardhub", "b", slots=16, at_once=3),
    ]
    assert fleet_figures("rewardhub", scorers) == {"fleet/reward_hubs": 2, "fleet/scores": 5}
