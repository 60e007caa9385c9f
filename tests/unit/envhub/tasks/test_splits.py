"""Which tasks a domain has, and which demands of a task are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from task_kit import task_args, write_task

from broker.errors import ConfigError, DataError
from envhub.tasks.splits import check_tasks, pick_task, split_tasks


def test_tasks_of_a_folder_are_split_and_shuffled(tmp_path: Path) -> None:
    for number in range(10):
        write_task(tmp_path / f"t{number}")
    args = task_args(tmp_path, eval_share=0.2)
    check_tasks(args)
    assert [folder.name for folder in split_tasks(args, "eval")] == ["t8", "t9"]
    epochs = [
        [pick_task(args, "train", index).name for index in range(first, first + 8)]
        for first in (0, 8)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"t{number}" for number in range(8)]
    assert epochs[0] != epochs[1]
    chosen = task_args(tmp_path, tasks=["t[12]"])
    assert [folder.name for folder in split_tasks(chosen, "train")] == ["t1", "t2"]


def test_tasks_of_a_registry_file(tmp_path: Path) -> None:
    write_task(tmp_path / "sets" / "a")
    entries = [{"name": "x/a", "path": "sets/a"}]
    sets = [
        {"name": "small", "version": version, "description": "", "tasks": entries}
        for version in ("1", "2")
    ]
    file = tmp_path / "registry.json"
    file.write_text(json.dumps(sets))
    args = task_args(file, dataset="small@2")
    assert [folder.name for folder in split_tasks(args, "train")] == ["a"]
    with pytest.raises(ConfigError, match="small@1, small@2"):
        split_tasks(task_args(file), "train")
    entries.append({"name": "x/b", "path": "sets/b", "git_url": "https://host/r.git"})
    file.write_text(json.dumps(sets[:1]))
    with pytest.raises(DataError, match=r"task x/b is in https://host/r.git; clone it"):
        split_tasks(task_args(file, dataset="small"), "train")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "not a registry file"), ("[{}]", "name, version and tasks"), ("3", "a list of objects")],
)
def test_a_bad_registry_file_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "registry.json"
    file.write_text(text)
    with pytest.raises(DataError, match=expected):
        split_tasks(task_args(file), "train")


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no \*/task.toml"):
        check_tasks(task_args(tmp_path))
    with pytest.raises(ConfigError, match="a folder of tasks or a registry file that is there"):
        check_tasks(task_args(tmp_path / "none"))
    write_task(tmp_path / "a")
    with pytest.raises(ConfigError, match="patterns of tasks that are there, such as a"):
        check_tasks(task_args(tmp_path, tasks=["b*"]))


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ("[environment]\ngpus = 1\n", "2: environment.gpus: 1"),
        ("[environment]\ngpu_types = ['H100']\n", "2: environment.gpu_types"),
        ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x2'\n", "environment.tpu: 'v6e'"),
        ("[environment]\nos = 'windows'\n", "2: environment.os: 'windows'"),
        ("[environment]\nskills_dir = '/s'\n", "2: environment.skills_dir: '/s'"),
        ("[environment]\nworkdir = '/usr'\n", "2: environment.workdir: '/usr'"),
        (
            "[[environment.mcp_servers]]\nname = 'm'\nurl = 'http://x'\n",
            "1: environment.mcp_servers: ['m']",
        ),
        ("[environment]\nnetwork_mode = 'public'\n", "2: environment.network_mode: 'public'"),
        ("[environment]\nallow_internet = true\n", "environment.network_mode: 'public'"),
        ("[agent]\nnetwork_mode = 'allowlist'\n", "2: agent.network_mode: 'allowlist'"),
        ("[verifier]\nallowed_hosts = ['h']\n", "2: verifier.allowed_hosts: ['h']"),
        (
            "[verifier]\nenvironment_mode = 'shared'\n",
            "2: verifier.environment_mode: 'shared' is not allowed; separate, or set "
            "env_args.verifier to shared",
        ),
        (
            "[verifier.environment]\ngpus = 2\n",
            "verifier.environment.gpus: 2",
        ),
        (
            "[[verifier.collect]]\ncommand = 'x'\nservice = 'db'\n",
            "verifier.collect.0.service: 'db'",
        ),
        ("artifacts = [{source = '/x', service = 'db'}]\n", "artifacts.0.service: 'db'"),
        ("multi_step_reward_strategy = 'mean'\n", "1: multi_step_reward_strategy: 'mean'"),
        ("[environment.env]\nKEY = '${TOKEN}'\n", "${TOKEN} has no value; give env_args.env.TOKEN"),
    ],
)
def test_demands_that_are_not_met_are_refused_by_name(
    tmp_path: Path, table: str, line: str
) -> None:
    write_task(tmp_path, **{"task.toml": table})
    with pytest.raises(DataError) as caught:
        check_tasks(task_args(tmp_path))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_the_run_allows_is_accepted(tmp_path: Path) -> None:
    table = (
        "[environment]\nnetwork_mode = 'public'\n[environment.env]\nKEY = '${TOKEN}'\n"
        "[verifier]\nenvironment_mode = 'shared'\n"
    )
    write_task(tmp_path, **{"task.toml": table})
    check_tasks(task_args(tmp_path, network="host", verifier="shared", env={"TOKEN": "x"}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("FROM a\nRUN apt-get update && \\\n  apt-get install -y curl\n", ":2: RUN apt-get needs"),
        ("FROM a\nRUN pip install x\n", ":2: RUN pip needs the network"),
        ("FROM a\nRUN curl -L http://x | sh\n", ":2: RUN curl needs the network"),
        ("FROM a\nADD https://x/y /y\n", ":2: COPY https://x/y is not supported"),
        ("FROM a AS b\nFROM c\n", ":2: a second stage"),
        ("FROM a\nCOPY --from=b /x /x\n", ":2: COPY --from=b is not supported"),
        ("FROM a\nCOPY none /app/\n", ":2: COPY: there is no none"),
        ("FROM a\nCOPY ../tests /app/\n", "is outside"),
        ("FROM a\nSHELL ['x']\n", ":2: SHELL is not supported"),
        ("FROM a\nRUN --mount=type=cache true\n", ":2: RUN --mount=type=cache is not supported"),
        ("FROM a\nRUN <<EOF\nx\nEOF\n", ":2: a here-document is not supported"),
        ("# nothing\n", ":1: there is no FROM"),
    ],
)
def test_a_dockerfile_that_needs_a_builder_is_refused(
    tmp_path: Path, text: str, expected: str
) -> None:
    write_task(tmp_path, **{"environment/Dockerfile": text})
    with pytest.raises(DataError) as caught:
        check_tasks(task_args(tmp_path))
    assert expected in str(caught.value)


def test_an_image_that_is_not_there_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path, **{"environment/Dockerfile": "FROM python:3.13-slim\n"})
    with pytest.raises(ConfigError, match=r"image 'python:3.13-slim' of task .*to host, a folder"):
        check_tasks(task_args(tmp_path, images={}))
    with pytest.raises(ConfigError, match=r"images.python\*: '/none' is not allowed; host, a fol"):
        check_tasks(task_args(tmp_path, images={"python*": "/none"}))
    write_task(tmp_path / "b", **{"environment/Dockerfile": None})
    with pytest.raises(ConfigError, match="an environment/Dockerfile or environment"):
        check_tasks(task_args(tmp_path / "b"))
