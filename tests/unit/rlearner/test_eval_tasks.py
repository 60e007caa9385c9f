"""A run and ``rlearner eval`` measure each held-out task once: fewer by default, and an error where more are asked
for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import validate
from rlearner.evaluate.tasks import with_num_tasks

LAKE = {"env": "frozenlake", "max_turns": 3, "max_context_tokens": 256, "sampling": {"max_tokens": 4}}


def questions(folder: Path, rows: int, **env_args: Any) -> dict[str, Any]:
    file = folder / f"{rows}.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(rows)))
    return {"env": "qa", "env_args": {"path": str(file), **env_args}, "rewards": [{"name": "math_answer"}]}


def tasks(**asked: Any) -> int:
    found: int = with_num_tasks(validate(asked))["eval"]["tasks"]
    return found


def test_the_default_is_what_the_smallest_domain_has(tmp_path: Path) -> None:
    assert tasks(domains={"few": questions(tmp_path, 8)}) == 1
    assert tasks(domains={"few": questions(tmp_path, 20, eval_share=0.5), "lake": LAKE}) == 10
    assert tasks(domains={"many": questions(tmp_path, 600, eval_share=0.5)}) == 256
    assert tasks(domains={"lake": LAKE}) == 256


def test_more_than_there_are_is_refused_as_in_a_run(tmp_path: Path) -> None:
    domains = {"few": questions(tmp_path, 8, eval_share=0.25)}
    assert tasks(domains=domains, eval={"tasks": 2}) == 2
    line = r"^eval\.tasks: 3 is not allowed; at most 2, the held-out tasks of domain few$"
    with pytest.raises(ConfigError, match=line):
        tasks(domains=domains, eval={"tasks": 3})
    with pytest.raises(ConfigError, match=line):
        validate({"domains": domains, "eval": {"tasks": 3, "every_steps": 1}})
    with pytest.raises(
        ConfigError,
        match=r"^eval\.tasks: 256 is not allowed; domain none has no held-out tasks; "
        r"eval\.every_steps=0 measures none$",
    ):
        tasks(domains={"none": questions(tmp_path, 8, eval_share=0)})


def test_a_run_lowers_the_default_by_itself(tmp_path: Path) -> None:
    """Nobody asked for 256 of them."""
    domains = {"few": questions(tmp_path, 1000, eval_share=0.05)}
    assert validate({"domains": domains, "eval": {"every_steps": 1}})["eval"]["tasks"] == 50
    assert validate({"domains": {**domains, "lake": LAKE}, "eval": {"every_steps": 1}})["eval"]["tasks"] == 50
    assert validate({"domains": {"lake": LAKE}, "eval": {"every_steps": 1}})["eval"]["tasks"] == 256
    with pytest.raises(
        ConfigError, match=r"^eval\.tasks: 51 is not allowed; at most 50, the held-out tasks of domain few$"
    ):
        validate({"domains": domains, "eval": {"every_steps": 1, "tasks": 51}})


def test_a_run_that_measures_nothing_needs_no_held_out_tasks(tmp_path: Path) -> None:
    config = validate({"domains": {"none": questions(tmp_path, 8, eval_share=0)}})
    assert config["eval"]["tasks"] is None
