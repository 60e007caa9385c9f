"""What a shell offers, asked as bash asks: the real program with its completion variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from broker.settings.completion import runs, settings


def offered(line: str, folder: Path, module: str = "rlearner.cli") -> list[str]:
    """What could come at the end of a command line; the answer comes on file descriptor 8, so here
    in a file.
    """
    out = folder / "offered"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = f"import sys; sys.argv[0] = {line.split()[0]!r}; from {module} import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | asked,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(out.read_text().split("\n"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlearner dra", ["drain", "draw"]),
        ("rlearner up x.yaml --re", ["--rebase"]),
        ("rlearner up x.yaml checkpoint.k", ["checkpoint.keep="]),
        ("rlearner status f", ["first", "fourth"]),
        ("rlearner diff first f", ["first", "fourth"]),
        ("rlearner up qui", ["quickstart"]),
        ("rlearner up mi", ["mine.yaml"]),
    ],
)
def test_commands_options_settings_and_runs(line: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    for name in ("first", "fourth", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    assert offered(line, tmp_path) == expected


def test_the_other_programs_too(tmp_path: Path) -> None:
    assert "--gpus" in offered("rollout-server --g", tmp_path, "rollout.cli")


def test_settings_come_section_by_section() -> None:
    assert {"train.", "domains.", "rollout."} <= set(settings(""))
    assert settings("algorithm.adv_e") == ["algorithm.adv_estimator="]
    assert {"model.path=", "model.tiny.hidden_size="} <= set(settings("model."))
    assert settings("domains.lake.") == []


def test_runs_of_another_folder(tmp_path: Path) -> None:
    import argparse

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").touch()
    assert runs("o", argparse.Namespace(dir=str(tmp_path))) == ["other"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_code_for_a_shell_names_every_program(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rlearner.cli import main

    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert all(
        name in code for name in ("rlearner", "rollout-server", "envhub", "rewardhub", "broker")
    )
