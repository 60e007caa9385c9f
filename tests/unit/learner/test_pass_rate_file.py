"""Pass rates of a run in a file, and which files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from broker.errors import ConfigError
from learner.credit.model_identity import ModelIdentity
from learner.credit.pass_rate_file import FILE, read_pass_rates, write_pass_rates

MODEL = ModelIdentity("small", "00ff")
KEYS = {"math": b"aaaaaaaabbbbbbbbcccccccc"}


def write_rates(folder: Path) -> Path:
    # levels of 0.004: 63 is 0.252; 255 was never measured
    write_pass_rates(
        folder / FILE, MODEL, "first", levels={"math": bytes([63, 255, 250])}, keys=KEYS
    )
    return folder / FILE


def test_rates_are_read_as_written(tmp_path: Path) -> None:
    path = write_rates(tmp_path)
    expected = {b"aaaaaaaa": 0.252, b"cccccccc": 1.0}
    assert read_pass_rates(str(path), "key", MODEL) == expected
    # a run's folder stands for its file
    assert read_pass_rates(str(tmp_path), "key") == expected


def test_rates_of_another_model_are_refused(tmp_path: Path) -> None:
    path = write_rates(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_pass_rates(str(path), "domains.x.curriculum.pass_rates", ModelIdentity("big", "11"))
    assert str(caught.value) == (
        f"domains.x.curriculum.pass_rates: {str(path)!r} is not allowed; pass rates of this run's "
        "model, big (11); the file has those of small (00ff)"
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "no JSON",
        json.dumps({"pass_rates": 1, "model": "a", "model_digest": "b", "run": "c"}) + "\n{}\n",
        json.dumps({"pass_rates": 1, "model": "a", "model_digest": "b", "run": "c"})
        + '\n{"domain": "x", "task": "00", "rate": 1.5}\n',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="a file that a run wrote"):
        read_pass_rates(str(path), "key")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_pass_rates(str(tmp_path), "key")
