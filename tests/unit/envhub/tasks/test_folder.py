"""A task folder: what it may hold, and one clear line for what it may not."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_kit import write_task

from broker.errors import DataError
from envhub.tasks.config import resolve_variables
from envhub.tasks.folder import read_task


@pytest.fixture(autouse=True)
def _fresh_cache() -> None:
    read_task.cache_clear()


def test_task_of_one_step(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "yes"))
    assert (task.name, len(task.steps), task.table.verifier.timeout_sec) == ("yes", 1, 5.0)
    assert task.steps[0].instruction == "Write yes to /app/answer.txt."
    assert task.steps[0].tests == (tmp_path / "yes" / "tests",)


def test_older_schema_is_read(tmp_path: Path) -> None:
    table = (
        'version = "1.0"\n[metadata]\nadded = 2025-01-01\n[environment]\nmemory = "2G"\n'
        'storage = "512M"\nallow_internet = false\n'
    )
    task = read_task(write_task(tmp_path, **{"task.toml": table}))
    environment = task.table.environment
    assert (task.table.schema_version, environment.memory_mb, environment.storage_mb) == (
        "1.0",
        2048,
        512,
    )
    assert environment.network == "no-network"


def test_canary_lines_are_not_shown(tmp_path: Path) -> None:
    text = "<!-- benchmark CANARY 123 -->\n# canary 4\n\nDo it.\n"
    assert read_task(write_task(tmp_path, **{"instruction.md": text})).steps[0].instruction == (
        "Do it."
    )


def test_steps_have_folders_of_their_own(tmp_path: Path) -> None:
    table = '[[steps]]\nname = "one"\nmin_reward = 0.5\n[[steps]]\nname = "two"\n'
    files: dict[str, str | None] = {"task.toml": table, "instruction.md": None}
    for name in ("one", "two"):
        files[f"steps/{name}/instruction.md"] = f"step {name}"
    files["steps/two/tests/extra.txt"] = "x"
    files["steps/two/workdir/setup.sh"] = "true"
    task = read_task(write_task(tmp_path, **files))
    first, second = task.steps
    assert (first.instruction, first.table.min_reward, first.setup) == ("step one", 0.5, None)
    assert second.tests == (tmp_path / "tests", tmp_path / "steps/two/tests")
    assert second.setup == tmp_path / "steps/two/workdir"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tests/test.sh": None}, "tests/test.sh:1: there is no such file: the task has no tests"),
        ({"instruction.md": None}, "instruction.md:1: No such file"),
        ({"instruction.md": " \n"}, "instruction.md:1: empty: the agent is told nothing"),
        ({"task.toml": None}, "task.toml:1: No such file"),
        ({"task.toml": "[agent\n"}, "task.toml:1: not TOML"),
        (
            {"task.toml": "\n[agent]\ntimeout_sek = 5\n"},
            "task.toml:3: agent.timeout_sek: 5 is not allowed; unknown key, did you mean "
            "'agent.timeout_sec'?",
        ),
        (
            {"task.toml": '[verifier]\ntimeout_sec = "x"\n'},
            "task.toml:2: verifier.timeout_sec: 'x' is not allowed",
        ),
        (
            {"task.toml": '[environment]\nmemory = "much"\n'},
            "memory: write a size such as 512M or 2G",
        ),
        (
            {"task.toml": '[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n'},
            "two steps have the same name",
        ),
        ({"task.toml": '[[steps]]\nname = "../x"\n'}, "cannot be the name of a folder"),
        ({"task.toml": 'artifacts = [{source = "/a/../b"}]\n'}, "leaves its folder"),
        ({"trajectory.json": "{}"}, "trajectory.json:1: a conversation before"),
        ({"environment/docker-compose.yaml": "x"}, "there is one sandbox and no compose file"),
        ({"tests/.harborignore": "x"}, "ignore rules are not read"),
    ],
)
def test_bad_folders_are_refused(
    tmp_path: Path, files: dict[str, str | None], expected: str
) -> None:
    with pytest.raises(DataError) as caught:
        read_task(write_task(tmp_path, **files))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_variables_come_from_the_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of the hub")
    values = {"A": "${SECRET:-none}", "B": "plain $x", "C": "${GIVEN}"}
    assert resolve_variables(values, {"GIVEN": "3"}) == {"A": "none", "B": "plain $x", "C": "3"}
    with pytest.raises(KeyError, match="SECRET"):
        resolve_variables({"A": "${SECRET}"}, {})
