"""Reference answers are read before anything starts: those that are no mathematics are listed with
row and reason.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.settings.run_settings import RunSettings
from rlearner.cli import main
from rlearner.doctor.references import reference_findings

AS_TEXT = "cannot be parsed as mathematics, so answers are compared with it as text"


def write(
    folder: Path,
    answers: list[str],
    *,
    rewards: str = "[{name: math_answer}]",
    name: str = "rows.jsonl",
) -> tuple[Path, Path]:
    data = folder / name
    data.write_text(
        "".join(json.dumps({"question": "?", "answer": answer}) + "\n" for answer in answers)
    )
    config = folder / "run.yaml"
    config.write_text(
        "model: {path: null}\n"
        f"domains: {{d: {{env: qa, env_args: {{path: {data}}}, max_turns: 1, sampling: {{max_tokens: 4}}, "
        f"rewards: {rewards}}}}}\n"
    )
    return config, data


def test_check_lists_rows_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        "yes",
        "42",
        "p - q",
        "(3,4)",
        "work\n####",
        "Mount Everest",
        "6 - 5i",
        "x",
        "2,3",
        "A sum.\n#### 7",
        "{" * 1500 + "}" * 1500,
    ]
    config, data = write(tmp_path, answers)
    assert main(["check", "--no-trial", str(config)]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "references" in line]
    shown = f"{data}, row 1: 'yes'; {data}, row 6: 'Mount Everest'; {data}, row 11: '...{'}' * 40}'"
    assert warnings == [
        f"warning: domains.d.rewards.0: 3 of 11 references: each {AS_TEXT} ({shown})",
        f"warning: domains.d.rewards.0: 1 of 11 references: each holds no answer ({data}, row 5: 'work ####')",
    ]


def test_nothing_is_said_of_numbers_and_of_other_rewards(tmp_path: Path) -> None:
    from broker.settings.runspec import load, validate

    config, _ = write(tmp_path, ["#### 1", "2.5", "-3", "1,000"])
    assert reference_findings(RunSettings.of_config(validate(load(str(config), [])))) == []
    config, _ = write(tmp_path, ["yes", "no"], rewards="[{name: format, args: {pattern: x}}]")
    assert reference_findings(RunSettings.of_config(validate(load(str(config), [])))) == []
