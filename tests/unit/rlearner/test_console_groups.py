"""A group in the console: what ``rlearner show`` and ``trace`` print, advantages; words,
evaluations, events, runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import index_kit
import numpy as np
import pytest
import run_folder_kit as kit
import yaml
from envhub_kit import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from broker.contract import wire
from broker.errors import UserError
from learner.algorithm.token_figures import NO_FIGURES, TokenFigures
from learner.credit import archive
from learner.credit.token_files import TokenFiles, file_of
from learner.reporting.starts import note_start
from rlearner.console.index import texts
from rlearner.console.index.answers import TrajectoryFilter
from rlearner.console.index.queries import RunQueries
from rlearner.console.index.run_index import RunIndex
from rlearner.ops.cli import add_parsers
from rlearner.ops.showing import show_run
from rlearner.ops.tracing import trace_run
from rlearner.up.event_log import MAX_BYTES, ProcessEvent, note_events

SAID = {1: "go left, then down", 2: "turn_right(3)", 5: "向左走两步 then stop", 6: "Größe: élan"}
REWARDS = (0.0, 1.0, 0.25, 2.0)
Print = Callable[..., Any]


def built(folder: Path) -> RunQueries:
    index = RunIndex(folder)
    index_kit.finish(index)
    index.close()
    return RunQueries(folder)


def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
    """Four episodes with different rewards; the last one is greedy."""
    if ticket.number == 4:
        return [
            wire.Closed(ticket=4, domain="lake", reason="env_error", detail="it broke", by="hub-1")
        ]
    plain = [
        kit.trajectory(i, reward, [ticket.min_version, 4], ("s1", "s2"))
        for i, reward in enumerate(REWARDS)
    ]
    said = SAID.get(ticket.number, "nothing")
    turns = [[replace(turn, reward=one.reward / 2) for turn in one.turns] for one in plain]
    given = [
        replace(one, response=f"{said} {one.episode}", turns=own, greedy=one.episode == 3)
        for one, own in zip(plain, turns, strict=True)
    ]
    return [
        kit.group(
            ticket, trajectories=given, prompt=f"Question {ticket.number}?", reference="forty two"
        )
    ]


@pytest.fixture
async def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    write_tokenizer(folder / "model")
    await kit.World(folder, answer).learn()
    return folder


def configure(folder: Path, **algorithm: Any) -> None:
    config = {"run": {"name": "run"}, "train": {"steps": kit.STEPS}, "algorithm": algorithm}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def printed(run: Path, capsys: pytest.CaptureFixture[str]) -> Print:
    """Runs an operator's command; its output."""
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())

    async def call(*arguments: str) -> str:
        options = parser.parse_args([arguments[0], str(run), *arguments[1:]])
        assert await {"show": show_run, "trace": trace_run}[arguments[0]](options) == 0
        return capsys.readouterr().out

    return call


async def test_a_group_is_what_show_prints(run: Path, printed: Print) -> None:
    queries = built(run)
    for ticket in (1, 2, 5):
        expected, view = (
            json.loads(await printed("show", str(ticket), "--tokens", "--json")),
            queries.group(ticket),
        )
        assert (view.tokenizer, view.provenance.state) == (expected["tokenizer"], expected["state"])
        assert (view.prompt, view.reference, len(view.trajectories)) == (
            f"Question {ticket}?",
            "forty two",
            4,
        )
        for shown, one in zip(view.trajectories, expected["trajectories"], strict=True):
            assert (shown.reward, shown.reward_parts, shown.greedy) == (
                one["reward"],
                one["reward_parts"],
                one["greedy"],
            )
            for piece, told in zip(shown.pieces, one["pieces"], strict=True):
                assert (piece.start, piece.end, piece.text) == (
                    told["start"],
                    told["end"],
                    told["text"],
                )
                if "turn" not in told:
                    assert (piece.turn, piece.tokens) == (0, [])
                    continue
                assert (piece.turn, piece.server, piece.logprob) == (
                    told["turn"],
                    told["server"],
                    told["logprob"],
                )
                names = ("position", "id", "text", "logprob", "reward")
                assert [
                    {name: getattr(token, name) for name in names} for token in piece.tokens
                ] == [{name: token[name] for name in names} for token in told["tokens"]]
                assert {(token.version, token.mask) for token in piece.tokens} == {
                    (told["policy_version"], True)
                }


async def test_provenance_is_what_trace_prints(run: Path, printed: Print) -> None:
    queries = built(run)
    for ticket in (1, 4, 5):
        assert queries.provenance(ticket).text == (await printed("trace", str(ticket))).splitlines()
    with pytest.raises(UserError, match="ticket 4 has no group: env_error, it broke"):
        queries.group(4)


async def test_recorded_entropies_and_ratios_are_on_their_tokens(run: Path, printed: Print) -> None:
    step = built(run).provenance(5).step
    column = np.array([0.25, 1.5, 0.0, 2.0], np.float16)
    figures = TokenFigures(column, np.log(np.array([0.5, 1.0, 2.0, 1.0])).astype(np.float16))
    files = TokenFiles(run / archive.FOLDER, step)
    # the second was masked, the fourth is greedy
    files.write(step, {5: [figures, NO_FIGURES, figures, NO_FIGURES]})
    files.close()
    view = built(run).group(5)
    assert not {"entropy", "ratio"} & view.unavailable.keys()
    for place, one in enumerate(view.trajectories):
        tokens = [token for piece in one.pieces for token in piece.tokens]
        sampled = [(token.entropy, token.ratio) for token in tokens if token.mask]
        if place % 2:
            assert sampled == [(None, None)] * 4
        else:
            assert [entropy for entropy, _ in sampled] == column.tolist()
            assert [ratio for _, ratio in sampled] == pytest.approx([0.5, 1.0, 2.0, 1.0], rel=1e-3)
        assert all(token.entropy is None for token in tokens if not token.mask)
    lines = (await printed("show", "5", "--tokens", "--episode", "2")).splitlines()
    shown = [line.split("  entropy ")[1] for line in lines if "  entropy " in line]
    assert shown == [
        "0.2500  ratio 0.4999",
        "1.5000  ratio 1.0000",
        "0.0000  ratio 2.0004",
        "2.0000  ratio 1.0000",
    ]
    assert "entropy" not in await printed("show", "5", "--tokens", "--episode", "1")
    file_of(run / archive.FOLDER, step).write_bytes(b"torn")
    assert "is damaged: " in built(run).group(5).unavailable["ratio"]
    assert "entropy" not in await printed("show", "5", "--tokens")


def advantages(view: Any) -> list[list[float | None]]:
    return [
        [token.advantage for piece in one.pieces for token in piece.tokens if token.mask]
        for one in view.trajectories
    ]


def test_advantages_of_grpo_are_those_of_the_paper(run: Path) -> None:
    configure(run, adv_estimator="grpo")
    view = built(run).group(5)
    mean = sum(REWARDS) / 4
    spread = math.sqrt(sum((one - mean) ** 2 for one in REWARDS) / 3)
    for reward, found in zip(REWARDS[:3], advantages(view), strict=False):
        assert found == pytest.approx([(reward - mean) / (spread + 1e-6)] * 4, rel=1e-4)
    assert advantages(view)[3] == [None] * 4
    step = view.provenance.step
    assert set(view.unavailable.values()) == {
        f"not recorded for step {step} (samples.keep, with one rank)"
    }
    assert set(view.unavailable) == {"entropy", "ratio"}


def test_advantages_that_need_the_whole_step_use_all_its_groups(run: Path) -> None:
    configure(run, adv_estimator="reinforce++")
    queries = built(run)
    step = queries.provenance(5).step
    tickets = sorted(
        {row.ticket for row in queries.search(TrajectoryFilter(min_step=step, max_step=step)).rows}
    )
    assert len(tickets) == 2
    every = [
        one
        for ticket in tickets
        for own in advantages(queries.group(ticket))
        for one in own
        if one is not None
    ]
    assert len(every) == 2 * 3 * 4
    assert sum(every) / len(every) == pytest.approx(0.0, abs=1e-5)  # whitened over the step
    assert sum(one * one for one in every) / len(every) == pytest.approx(1.0, rel=0.06)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (
            {"adv_estimator": "./mine.py:advantage"},
            "is ./mine.py:advantage, which is code of the run",
        ),
        ({"adv_estimator": "gae", "critic": {"enabled": True}}, "they need the models' scores"),
        ({"adv_estimator": 7}, "they cannot be computed"),
    ],
)
def test_advantages_that_are_not_known_say_why(
    run: Path, algorithm: dict[str, Any], why: str
) -> None:
    configure(run, **algorithm)
    view = built(run).group(5)
    assert why in view.unavailable["advantage"]
    assert {one for own in advantages(view) for one in own} == {None}


def test_a_record_that_was_deleted_is_one_line(run: Path) -> None:
    queries = built(run)
    for path in (run / "samples").glob("*.frames"):
        path.unlink()
    with pytest.raises(UserError, match=r"record \d+ is not in the archive"):
        queries.group(5)
    assert queries.provenance(5).state == "trained"


@pytest.mark.parametrize(
    ("text", "tickets"),
    [
        ("left", {1}), ("LEFT down", {1}), ("lef", {1}), ('"lef"', set()), ('"then down"', {1}), ('"down then"', set()),
        ("turn_right", {2}), ("turn_right(3)", {2}), ("两步", {5}), ("步两", set()), ("左走 stop", {5}),
        ("große", {6}), ("elan", {6}), ("question 5", {5}), ("forty", {1, 2, 3, 5, 6, 7, 8, 9}),
        ("left question", set()), ("...", set()), ('" AND (', set()), ("NOT left", set()),
        ("response_texts:left", set()), ("*", set()),
    ],
)  # fmt: skip
def test_words_are_found(run: Path, text: str, tickets: set[int]) -> None:
    found = built(run).search(TrajectoryFilter(text=text), limit=1000)
    assert {row.ticket for row in found.rows if row.ticket < 10} == tickets
    if tickets == {1}:
        assert {row.episode for row in found.rows} == {0, 1, 2, 3}


@given(st.text(max_size=60))
def test_any_text_makes_a_query(text: str) -> None:
    expression = texts.match_expression(text)
    assert expression.count('"') % 2 == 0
    assert bool(expression) == bool(texts.words_of(text))


def test_a_build_without_full_text_search_finds_words_too(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "CREATE VIRTUAL TABLE {name} USING fts5_is_missing(text)"
    monkeypatch.setattr("rlearner.console.index.database.TEXTS", plain)
    queries = built(run)
    assert {row.ticket for row in queries.search(TrajectoryFilter(text="LEFT down")).rows} == {1}
    assert {row.ticket for row in queries.search(TrajectoryFilter(text="question 5")).rows} == {5}


def test_evaluations_have_intervals_tasks_and_frames(run: Path) -> None:
    (run / "evals").mkdir()
    rows = [
        {
            "domain": "lake" if n < 6 else "sea",
            "task_index": n,
            "success": [n < 7],
            "reward": [float(n)],
            "frames": ["a", "b"],
        }
        | {"prompt": f"task {n}", "text": "t", "response": "r"}
        for n in range(10)
    ]
    path = run / "evals" / "actor-step-000002.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    queries = built(run)
    (found,) = queries.evaluations()
    assert (found.step, found.policy, found.tasks, found.success_rate, found.reward_mean) == (
        2,
        "actor",
        10,
        0.7,
        4.5,
    )
    assert (round(found.low, 4), round(found.high, 4)) == (0.3968, 0.8922)  # Wilson
    assert found.by_domain == {"lake": 1.0, "sea": 0.25}
    tasks = queries.evaluated_tasks(2)
    assert [(one.task_index, one.successes, one.frames) for one in tasks] == [
        (n, int(n < 7), 2) for n in range(10)
    ]
    assert queries.evaluated_task(2, "actor", 4) == rows[4]
    assert queries.evaluated_task(2, "random", 4) == {}
    (event,) = queries.events(kinds=["evaluation"])
    assert (event.step, event.text) == (
        2,
        "actor evaluated after step 2: success 0.700 of 10 episodes",
    )


async def test_events_of_up_and_changed_settings_are_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    world = kit.World(run)
    await world.learn()
    note_events(
        run / "logs", [ProcessEvent("rollout-0 (pid 7) died by SIGKILL", "death", "rollout-0")]
    )
    more = [
        ProcessEvent("pid 8 is there", "start", "rollout-0"),
        ProcessEvent("exit code 2", "stop", "rollout-0"),
    ]
    note_events(run / "logs", [*more, "a disk died and rollout-0 ended with exit code 2"])
    world.rules = kit.rules(max_staleness=0, steps=6)
    await world.learn()
    found = built(run).events()
    ups = {(one.kind, one.who) for one in found if one.kind in ("death", "start", "stop", "note")}
    assert ups == {
        ("death", "rollout-0"),
        ("note", ""),
        ("stop", "rollout-0"),
        ("start", "rollout-0"),
    }
    checkpoints = [one.step for one in found if one.kind == "checkpoint"]
    assert checkpoints == [2, 4, 6]
    (start,) = [one for one in found if one.kind == "epoch"]
    assert start.text.startswith("learner started, epoch ")
    assert start.text.partition(": ")[2] == "steps: 4 -> 6, max_staleness: 1 -> 0"
    assert (start.step, start.approximate) == (4, True)
    # The rules lack the learning rate; the learner notes every setting that changed.
    epoch = int(start.text.split()[3].rstrip(":"))
    note_start(run, {}, epoch, data={}, model="", changes=["train.lr: 0.001 -> 0.002"])
    (start,) = built(run).events(kinds=["epoch"])
    assert start.text == f"learner started, epoch {epoch}: train.lr: 0.001 -> 0.002"


def test_the_event_log_stays_small_and_private(tmp_path: Path) -> None:
    for _ in range(40):
        note_events(tmp_path / "logs", ["x" * 1000] * 100)
    path = tmp_path / "logs" / "events.jsonl"
    assert path.stat().st_size < MAX_BYTES + 200_000
    assert {len(json.loads(line)["text"]) for line in path.read_text().splitlines()} == {1000}
    assert path.stat().st_mode & 0o777 == 0o600
