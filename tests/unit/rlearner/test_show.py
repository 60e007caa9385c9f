"""``rlearner show``: a group of an archived run, by hand."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run_folder_kit as kit
from envhub_kit import write_tokenizer
from run_folder_kit import two_turns

from broker.errors import ConfigError, UserError
from rlearner.ops.cli import add_parsers
from rlearner.ops.showing import show_run, text_of, trajectory_of
from rlearner_text.tokenizer import Tokenizer

Show = Callable[..., Any]


def lines(tmp_path: Path, *, tokens: bool) -> list[str]:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "model"))
    found = {
        "ticket": 1,
        "state": "trained",
        "step": 3,
        "domain": "lake",
        "task_index": 0,
        "tokenizer": "model",
    }
    return list(
        text_of({**found, "trajectories": [trajectory_of(two_turns(tokenizer), tokenizer)]}, tokens)
    )


def test_one_episode_turn_by_turn(tmp_path: Path) -> None:
    assert lines(tmp_path, tokens=False) == [
        "ticket 1: trained, trained in step 3; lake, task 0",
        "",
        "episode 0: reward 1.75 (env 1.5, length 0.25), solved, terminated",
        "  seen, tokens 0-7",
        "    | <|im_user|>PF",
        "    | HG<|im_end|><|im_assistant|>",
        "  turn 1, tokens 8-8: s1, version 0, reward 0.5, logprob -0.5000 (mean -0.5000), stop",
        "    | R",
        "  seen, tokens 9-16",
        "    | <|im_user|>SP",
        "    | HG<|im_end|><|im_assistant|>",
        "  turn 2, tokens 17-17: s1, version 0, reward 1, logprob -0.2500 (mean -0.2500), stop, no valid action",
        "    | D",
        "  turn 2, tokens 18-18: s1, version 1, reward 1, logprob -1.0000 (mean -1.0000), stop, no valid action",
        "    | X",
    ]


def test_every_token_has_reward_logprob_and_version(tmp_path: Path) -> None:
    rows = [line.split() for line in lines(tmp_path, tokens=True) if line[:10].strip().isdigit()]
    assert [(row[0], row[2], row[4], row[6]) for row in rows] == [
        ("8", '"R"', "-0.5000", "0"),
        ("17", '"D"', "-0.2500", "0"),
        ("18", '"X"', "-1.0000", "1"),
    ]
    # the hub's 0.25 stands on the last token
    assert [row[7:] for row in rows] == [["reward", "0.5"], [], ["reward", "1.25"]]


@pytest.fixture
async def show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """Runs the command on a finished run; its output."""
    write_tokenizer(tmp_path / "run" / "model")
    await kit.World(tmp_path / "run").learn()
    parser = argparse.ArgumentParser()
    add_parsers(parser.add_subparsers())

    async def run(*arguments: str) -> str:
        options = parser.parse_args(["show", "run", "--dir", str(tmp_path), *arguments])
        assert await show_run(options) == 0
        return capsys.readouterr().out

    return run


async def test_a_group_of_an_archived_run(show: Show, tmp_path: Path) -> None:
    found = json.loads(await show("2", "--json"))
    assert [trajectory["episode"] for trajectory in found["trajectories"]] == [0, 1]
    for trajectory in found["trajectories"]:
        ends = [piece["end"] for piece in trajectory["pieces"]]
        assert [piece["start"] for piece in trajectory["pieces"]] == [0, *ends[:-1]]
    shutil.rmtree(tmp_path / "run" / "model")
    out = await show("2", "--episode", "1")
    assert "tokenizer: none, so tokens are shown by their numbers" in out
    assert "    | 3 7\n" in out
    assert "episode 0" not in out


async def test_what_cannot_be_shown_is_one_line(show: Show) -> None:
    for arguments, error, told in (
        (("99",), UserError, "has no ticket 99; its tickets are 1-"),
        (("4",), UserError, "ticket 4 has no group: env_error, it broke"),
        (("2", "--episode", "7"), ConfigError, "one of 0, 1"),
    ):
        with pytest.raises(error, match=told):
            await show(*arguments)
