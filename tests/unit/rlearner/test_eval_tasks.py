"""A run and ``rlearner eval`` measure each held-out task once: fewer by default, and an error where
more are asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from broker.settings.runspec import check_settings, validate
from rlearner.evaluate.tasks import task_counts, with_whole_files

LAKE = {
    "env": "frozenlake",
    "max_turns": 3,
    "max_context_tokens": 256,
    "sampling": {"max_tokens": 4},
}


def questions(folder: Path, rows: int, **env_args: Any) -> dict[str, Any]:
    file = folder / f"{rows}.jsonl"
    file.write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(rows))
    )
    return {
        "env": "qa",
        "env_args": {"path": str(file), **env_args},
        "rewards": [{"name": "math_answer"}],
    }


def tasks(**asked: Any) -> int:
    (count,) = set(task_counts(check_settings(asked), {}).values())
    return count


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
        r"eval\.domains without it, or eval\.every_steps=0, measures none$",
    ):
        tasks(domains={"none": questions(tmp_path, 8, eval_share=0)})


def test_a_run_lowers_the_default_by_itself(tmp_path: Path) -> None:
    """Nobody asked for 256 of them."""
    domains = {"few": questions(tmp_path, 1000, eval_share=0.05)}
    assert validate({"domains": domains, "eval": {"every_steps": 1}})["eval"]["tasks"] == 50
    assert (
        validate({"domains": {**domains, "lake": LAKE}, "eval": {"every_steps": 1}})["eval"][
            "tasks"
        ]
        == 50
    )
    assert validate({"domains": {"lake": LAKE}, "eval": {"every_steps": 1}})["eval"]["tasks"] == 256
    with pytest.raises(
        ConfigError,
        match=r"^eval\.tasks: 51 is not allowed; at most 50, the held-out tasks of domain few$",
    ):
        validate({"domains": domains, "eval": {"every_steps": 1, "tasks": 51}})


def test_a_run_that_measures_nothing_needs_no_held_out_tasks(tmp_path: Path) -> None:
    config = validate({"domains": {"none": questions(tmp_path, 8, eval_share=0)}})
    assert config["eval"]["tasks"] is None


def counts(
    config: dict[str, Any], *overrides: str, model: str = "/nowhere/model"
) -> dict[str, int]:
    """Tasks of each domain when the command line has these overrides, which ``config`` already
    holds.
    """
    whole, files = with_whole_files(config, overrides, model)
    return task_counts(check_settings(whole), files)


def trained_run(folder: Path, file: str) -> str:
    """A checkpoint of a run that trained on a file."""
    run = folder / "trained"
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    (run / "epoch").write_text("1")
    (run / "config.yaml").write_text(json.dumps({"domains": {"few": {"env_args": {"path": file}}}}))
    return str(run / "checkpoints" / "step-000004")


def test_a_file_of_the_command_line_is_measured_whole(tmp_path: Path) -> None:
    config = {"domains": {"few": questions(tmp_path, 700)}}
    named = f"domains.few.env_args.path={tmp_path / '700.jsonl'}"
    assert counts(config, named) == {"few": 700}
    assert counts(config, "domains.few={env: qa}") == {"few": 700}
    # the configuration's own: its held-out share
    assert counts(config, "eval.group_size=2") == {"few": 35}
    assert counts({**config, "eval": {"tasks": 5}}, named) == {"few": 5}
    shared = {"domains": {"few": questions(tmp_path, 700, eval_share=0.1)}}
    assert counts(shared, named) == {"few": 70}


def test_a_file_for_evaluation_is_measured_whole_without_one_for_training(tmp_path: Path) -> None:
    file = questions(tmp_path, 700)["env_args"]["path"]
    domain = {"env": "qa", "env_args": {"eval_path": file}, "rewards": [{"name": "math_answer"}]}
    assert counts({"domains": {"few": domain, "lake": LAKE}}) == {"few": 700, "lake": 256}
    both = {
        **domain,
        "env_args": {"path": questions(tmp_path, 4)["env_args"]["path"], "eval_path": file},
    }
    assert counts({"domains": {"few": both}}) == {"few": 700}


def test_of_a_file_that_the_model_trained_on_only_the_rest_is_measured(tmp_path: Path) -> None:
    config = {"domains": {"few": questions(tmp_path, 700)}}
    file = config["domains"]["few"]["env_args"]["path"]
    named, copy = f"domains.few.env_args.path={file}", tmp_path / "copy.jsonl"
    copy.write_bytes(Path(file).read_bytes())
    assert counts(config, named, model=trained_run(tmp_path / "a", file)) == {"few": 35}
    assert counts(config, named, model=trained_run(tmp_path / "b", str(copy))) == {"few": 35}
    assert counts(config, named, model=trained_run(tmp_path / "c", "gone.jsonl")) == {"few": 700}


def test_levels_of_a_file_are_measured_whole(tmp_path: Path) -> None:
    level = "#####\n#@$.#\n#   #\n#####\n"
    (tmp_path / "levels.txt").write_text("".join(f"; {number}\n{level}\n" for number in range(30)))
    args = {"eval_path": str(tmp_path / "levels.txt")}
    domain = {
        "env": "sokoban",
        "env_args": args,
        "max_context_tokens": 448,
        "sampling": {"max_tokens": 4},
    }
    assert counts({"domains": {"box": domain}}) == {"box": 30}
