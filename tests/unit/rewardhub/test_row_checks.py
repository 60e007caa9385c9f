"""Rows that rewards cannot use are refused by ``check``, in one line with row and argument."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlearner.cli import main

GOOD = {"prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
BAD = {
    "prompt": "Write.",
    "instruction_id_list": ["length_constraints:number_words"],
    "kwargs": [{"num_words": "many", "relation": "at least"}],
}


def write_run(folder: Path, rows: list[dict[str, Any]], reward: str) -> tuple[Path, Path]:
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / "run.yaml"
    config.write_text(
        "model: {path: null}\n"
        f"domains: {{d: {{env: qa, env_args: {{path: {data}, question: prompt, answer: ''}}, "
        f"max_turns: 1, sampling: {{max_tokens: 4}}, rewards: [{reward}]}}}}\n"
    )
    return config, data


def test_wrong_argument_in_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, data = write_run(tmp_path, [GOOD, GOOD, BAD], "{name: instruction_following}")
    assert main(["check", "--no-trial", str(config)]) == 2
    # before it, a busy machine says what takes long
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.endswith(
        f"domains.d.rewards.0: {data}, row 3: instruction 1, length_constraints:number_words: "
        "kwarg num_words: 'many' is not allowed; expected a whole number of at least 0"
    )


def test_good_rows_are_accepted(tmp_path: Path) -> None:
    config, _ = write_run(tmp_path, [GOOD, GOOD], "{name: instruction_following}")
    assert main(["check", "--no-trial", str(config)]) == 0


def test_rubric_that_contradicts_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"type": "object", "properties": {"other": {"type": "boolean"}}}
    rubric = {"criteria": [{"name": "kind", "text": "It is kind."}], "schema": schema}
    reward = "{name: rubric, args: {base_url: 'http://127.0.0.1:9/v1'}}"
    rows = [{"prompt": "Write.", "rubric": rubric}, {"prompt": "Speak.", "rubric": rubric}]
    config, data = write_run(tmp_path, rows, reward)
    assert main(["check", "--no-trial", str(config)]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(
            f"domains.d.rewards.0: {data}, row 1: column 'rubric': criteria.0.name: 'kind' is not "
            "allowed; the schema has only other"
        )
    )


@pytest.mark.parametrize("name", ["instruction_following", "rubric"])
def test_shipped_recipes_are_accepted(name: str) -> None:
    assert main(["check", "--no-trial", f"configs/{name}.yaml"]) == 0
