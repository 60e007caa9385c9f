"""Looking up plug-ins: the table, a dotted path, a file, an entry point, and every way to get it
wrong.
"""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from broker.errors import ConfigError
from broker.settings import registry

TABLE = {
    "plain": "json:dumps",
    "nested": "pathlib:Path.home",
    "broken": "json:no_such_thing",
    "heavy": "no_such_heavy_library.x:y",
}


def test_a_name_of_the_table() -> None:
    import json

    assert registry.resolve("engines", "plain", TABLE) is json.dumps
    assert registry.resolve("engines", "nested", TABLE) == Path.home


def test_a_dotted_path() -> None:
    import collections

    assert registry.resolve("engines", "collections:OrderedDict", TABLE) is collections.OrderedDict


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        registry.resolve("engines", "plane", TABLE)
    assert str(caught.value) == (
        "engines: 'plane' is not allowed; did you mean 'plain'? known: broken, heavy, nested, plain; "
        "or 'package.module:attribute', or 'file.py:attribute'"
    )


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Score:\n    value: int = 7\n"
    )
    score = registry.resolve("rewards", f"{file}:Score", {})
    assert score().value == 7
    assert registry.resolve("rewards", f"{file}:Score", {}) is score  # loaded once
    assert score.__module__ in sys.modules


def test_a_module_beside_the_user_is_found_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_own_rewards.py").write_text("def score():\n    return 3\n")
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text("shadow = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert registry.resolve("rewards", "my_own_rewards:score", {})() == 3
    assert sys.path[-1] == str(tmp_path)
    import json

    assert registry.resolve("rewards", "json:dumps", {}) is json.dumps


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:f", f"there is no file nowhere.py in {Path.cwd()}"),
        ("/nowhere/at_all.py:f", "there is no file /nowhere/at_all.py"),
        ("./mine.py", "add ':function' or ':Class', a name in that file: ./mine.py:NAME"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("json:nothing", "json has no 'nothing'"),
        ("json:", "write 'package.module:attribute' or 'file.py:attribute'"),
        ("broken", "json has no 'no_such_thing'"),
        ("heavy", "there is no module 'no_such_heavy_library.x'"),
    ],
)
def test_what_cannot_be_found(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.resolve("engines", name, TABLE)
    assert str(caught.value) == f"engines: {name!r} is not allowed; {says}"


def test_a_plug_in_that_needs_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wants_vllm_here.py").write_text("import no_such_engine\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(
        ConfigError, match="it needs the package 'no_such_engine', which is not installed"
    ):
        registry.resolve("engines", "vllm", {"vllm": "wants_vllm_here:Engine"})


def test_a_file_that_fails_is_one_line_and_may_be_mended(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"bad\.py fails to import: ZeroDivisionError: division by zero"
    ):
        registry.resolve("rewards", f"{file}:f", {})
    file.write_text("def f():\n    return 1\n\n\n# longer, so that its cached byte code is stale\n")
    assert registry.resolve("rewards", f"{file}:f", {})() == 1


def test_a_plug_in_that_ends_the_program_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "says_bye.py").write_text('raise SystemExit("bye")\n')
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    for name in (f"{tmp_path}/says_bye.py:f", "says_bye:f"):
        with pytest.raises(
            ConfigError,
            match=r"says_bye(\.py)? fails to import: SystemExit: bye \(says_bye\.py:\d+ in <module>\)$",
        ):
            registry.resolve("envs", name, {})


def test_entry_points_count_as_known(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("theirs", "json:loads", "rlearner.engines")])
    monkeypatch.setattr(registry, "entry_points", points.select)
    import json

    assert registry.resolve("engines", "theirs", TABLE) is json.loads
    assert registry.known("engines", TABLE) == ["broken", "heavy", "nested", "plain", "theirs"]
    with pytest.raises(ConfigError):
        registry.resolve("rewards", "theirs", TABLE)
