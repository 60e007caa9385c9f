"""Options of benchmarks that are refused, and what their help calls them."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "tail.__main__",
            ["abc"],
            "argument SEED: 'abc' is not allowed; a whole number of at least 0",
        ),
        (
            "tail.__main__",
            ["1", "-1"],
            "argument SEED: '-1' is not allowed; a whole number of at least 0",
        ),
        (
            "overlap",
            ["--steps", "0"],
            "argument --steps: '0' is not allowed; a whole number of at least 1",
        ),
        (
            "overlap",
            ["--steps", "-1"],
            "argument --steps: '-1' is not allowed; a whole number of at least 1",
        ),
        (
            "overlap",
            ["--seconds", "nan"],
            "argument --seconds: 'nan' is not allowed; a number above 0",
        ),
        (
            "peers.__main__",
            ["--pairs", "0"],
            "argument --pairs: '0' is not allowed; a whole number of at least 1",
        ),
    ],
)
def test_bad_options_are_refused(
    name: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name}").main(options)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tail", "advice", "peers"])
def test_help_names_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"bench.{name}.__main__").main(["--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m bench.{name} ")
