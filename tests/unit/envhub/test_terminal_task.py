"""``env: task`` in real sandboxes: tools, limits, outages, and cheats that gain nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from envhub_kit import Scripted, domain, write_tokenizer
from task_kit import write_task

from bench.support.task_cheats import CHEATS
from broker.errors import ConfigError
from envhub.config import check
from envhub.demos import demonstrations
from envhub.envs.tools.terminal_task import TerminalTask
from envhub.tasks.folder import read_task
from envhub.tasks.generated import KINDS, write_tasks
from envhub.tasks.settings import TaskArgs
from rlearner_sandbox.providers.base import SandboxError
from rlearner_text.tool_calls import ToolCall

pytestmark = pytest.mark.sandbox
Make = Callable[..., TerminalTask]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes environments with the tasks of a folder."""
    read_task.cache_clear()
    environments: list[TerminalTask] = []

    def environment(folder: Path, **fields: object) -> TerminalTask:
        settings = {
            "path": str(folder),
            "images": {"*": "host"},
            "eval_path": str(folder),
            "provider_args": {"folder": str(tmp_path / "sandboxes")},
            **fields,
        }
        args = TaskArgs.model_validate(settings)
        TerminalTask.check(args)
        environments.append(TerminalTask(args))
        return environments[-1]

    yield environment
    for each in environments:
        await each.close()


def shell(command: str) -> list[ToolCall]:
    return [ToolCall("shell", {"command": command})]


SUBMIT = [ToolCall("submit", {})]


async def test_tools_show_output_and_how_commands_end(make: Make, tmp_path: Path) -> None:
    task = make(write_task(tmp_path / "t"), output_chars=64, command_timeout_s=1.0, max_steps=30)
    first = await task.reset(0, "train", 0)
    assert (first.text, task.prompt) == ("Write yes to /app/answer.txt.",) * 2

    async def show(*calls: ToolCall) -> tuple[str, bool]:
        step = await task.use(calls)
        assert (step.reward, step.done) == (0.0, False)
        return step.observation.text, step.valid

    assert await show(*shell("echo out; echo err >&2; exit 3")) == ("out\nerr\n[exit code 3]", True)
    assert await show(*shell("true")) == ("[no output]", True)
    long, _ = await show(*shell("seq 1 1000"))
    assert long.startswith("1\n2\n3\n")
    assert long.endswith("\n999\n1000")
    assert "characters cut" in long
    assert len(long) < 120
    endless, _ = await show(*shell("yes"))
    assert endless.endswith("[killed: its time was over]")
    assert await show(*shell("printf 'a\\0b\\377'")) == ("ab\ufffd", True)
    edit = ToolCall("edit", {"path": "f/x.txt", "old": "", "new": "one\ntwo\none\n"})
    assert await show(edit) == ("f/x.txt is written", True)
    again = ToolCall("edit", {"path": "f/x.txt", "old": "one", "new": "1"})
    assert await show(again) == ("error: old is in f/x.txt 2 times; it must be there once", True)
    good = ToolCall("edit", {"path": "/app/f/x.txt", "old": "two", "new": "2"})
    assert await show(good, *shell("cat f/x.txt")) == (
        "/app/f/x.txt is written\none\n2\none",
        True,
    )
    for path in ("none", "f", "/proc/self/none/x", "x\0y" * 3000):
        text, is_valid = await show(ToolCall("edit", {"path": path, "old": "a", "new": "b"}))
        assert text.startswith("error: ")
        assert is_valid
    for call, expected in (
        (ToolCall("fly", {}), "error: there is no tool 'fly'"),
        (ToolCall("shell", {}), "error: shell needs a command"),
        (ToolCall("shell", {"command": 3}), "error: shell: command is not a text"),
        (ToolCall("edit", {"path": "x"}), "error: edit needs path and new"),
    ):
        text, is_valid = await show(call)
        assert text.startswith(expected)
        assert not is_valid
    step = await task.step("What now?")
    assert (step.observation.text, step.valid) == ("Call shell, edit or submit.", False)
    step = await task.use([*shell("echo yes > answer.txt"), *SUBMIT, *shell("rm answer.txt")])
    assert (step.reward, step.done, step.success, step.truncated) == (1.0, True, True, False)


async def test_last_step_is_graded(make: Make, tmp_path: Path) -> None:
    task = make(write_task(tmp_path / "t"), max_steps=2, form="text")
    await task.reset(0, "train", 0)
    await task.step("<shell>echo yes > answer.txt</shell>")
    step = await task.step("hm")
    assert (step.reward, step.done, step.truncated, step.valid) == (1.0, True, True, False)


async def test_time_of_all_commands_is_limited(make: Make, tmp_path: Path) -> None:
    table = "[agent]\ntimeout_sec = 0.5\n[verifier]\ntimeout_sec = 5.0\n"
    task = make(write_task(tmp_path / "t", **{"task.toml": table}))
    await task.reset(0, "train", 0)
    step = await task.use(shell("echo yes > answer.txt; sleep 60"))
    assert (step.reward, step.done, step.truncated) == (1.0, True, True)


async def test_broken_shell_is_the_policys_fault(make: Make, tmp_path: Path) -> None:
    task = make(write_task(tmp_path / "t"))
    await task.reset(0, "train", 0)
    await task.use(shell(CHEATS["broken shell"]))
    step = await task.use(shell("echo still here"))
    assert (step.done, step.reward) == (False, 0.0)
    assert (await task.use(SUBMIT)).reward == 0.0


async def test_episodes_begin_alike_and_leave_no_sandbox(make: Make, tmp_path: Path) -> None:
    task = make(write_task(tmp_path / "t"))
    for _ in range(2):
        await task.reset(0, "train", 0)
        step = await task.use(shell("ls /app /tests 2>&1; touch here /tests"))
        assert "here" not in step.observation.text
    await task.use(SUBMIT)
    await task.close()
    left = [path.name for path in (tmp_path / "sandboxes").rglob("sandbox-*")]
    assert left == []


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generated") / "tasks"
    write_tasks(folder, per_kind=1)
    return folder


async def test_generated_tasks_are_solved_by_their_scripts(make: Make, tasks: Path) -> None:
    task = make(tasks)
    for index in range(len(KINDS)):
        await task.reset(index, "eval", 0)
        for _ in range(2):
            calls = task.demonstrate(np.random.default_rng(0), 0.0)
            step = await task.use(calls)  # type: ignore[arg-type]
        assert (step.reward, step.success) == (1.0, True), task.prompt


@pytest.mark.parametrize("name", CHEATS)
async def test_cheats_gain_nothing(make: Make, tasks: Path, name: str) -> None:
    task = make(tasks)
    for index in range(len(KINDS)):
        await task.reset(index, "eval", 0)
        await task.use(shell(CHEATS[name]))
        step = await task.use(SUBMIT)
        assert (step.reward, step.success) == (0.0, False), task.prompt


async def test_cheats_work_where_the_tests_share_the_files(make: Make, tmp_path: Path) -> None:
    """Show that they are not idle: without the boundary, several of them pass."""
    write_tasks(tmp_path / "shared", per_kind=1, verifier="shared")
    task = make(tmp_path / "shared", verifier="shared")
    rewards = {}
    for name in ("reward file", "LD_PRELOAD", "overwritten shell"):
        await task.reset(0, "eval", 0)
        await task.use(shell(CHEATS[name]))
        rewards[name] = (await task.use(SUBMIT)).reward
    assert sum(rewards.values()) >= 1


def test_demonstrations_are_conversations_with_tool_calls(tasks: Path, tmp_path: Path) -> None:
    args = {
        "path": str(tasks),
        "images": {"*": "host"},
        "eval_share": 0.0,
        "provider_args": {"folder": str(tmp_path)},
    }
    played = list(
        demonstrations(domain("task", env_args=args, max_turns=16), episodes=2, noise=0.0, seed=0)
    )
    assert [success for _, success in played] == [True, True]
    names = [
        call["function"]["name"]
        for message in played[0][0][0]
        for call in message.get("tool_calls", ())
    ]
    assert names == ["shell", "submit"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_turns": 3}, "max_turns: 3 is not allowed; at least env_args.max_steps, which is 16"),
        ({"isolation": "process"}, "isolation: 'process' is not allowed; none"),
        ({"env_args": {"agent": ["x"]}}, "context: 'auto' is not allowed; steps"),
        ({"env_args": {"command_timeout_s": 25}}, "command_timeout_s: 25.0 is not allowed; at mo"),
        ({"env_args": {"provider": "none"}}, "env_args.provider: 'none' is not allowed"),
        ({"env_args": {"agent_files": {"x": "/"}}}, "agent_files.x: '/' is not allowed; a path"),
        ({"env_args": {"agent_files": {"/x": "/none"}}}, "a file or folder that is there"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tasks: Path, fields: dict[str, Any], expected: str
) -> None:
    from broker.settings.run_settings import RunSettings

    own = fields.pop("env_args", {})
    env_args = {"path": str(tasks), "images": {"*": "host"}, **own}
    section = {"env": "task", "env_args": env_args, "max_turns": 16, **fields}
    settings = RunSettings.model_validate({"domains": {"d": section}})
    with pytest.raises(ConfigError) as caught:
        check(settings)
    assert expected in str(caught.value)


def test_time_for_grading_is_checked(tmp_path: Path) -> None:
    from broker.settings.run_settings import RunSettings

    write_task(tmp_path, **{"task.toml": "[verifier]\ntimeout_sec = 600.0\n"})
    env_args = {"path": str(tmp_path), "images": {"*": "host"}, "eval_share": 0.0}
    section = {"env": "task", "env_args": env_args, "max_turns": 16}
    settings = RunSettings.model_validate({"domains": {"d": section}})
    with pytest.raises(ConfigError, match=r"^envhub.step_timeout_s: 30.0 is not allowed; at least"):
        check(settings)


async def test_outage_ends_an_episode_without_a_reward(make: Make, tmp_path: Path) -> None:
    task = make(
        write_task(tmp_path / "t"),
        provider="folder_sandbox:FolderProvider",
        provider_args={"fails_after": 5},
    )
    await task.reset(0, "train", 0)
    for _ in range(3):
        await task.use(shell("echo yes > answer.txt"))
    with pytest.raises(SandboxError, match="the daemon of the sandboxes is gone"):
        await task.use(SUBMIT)


async def test_outages_are_the_machines_and_bad_tasks_hopeless(tmp_path: Path) -> None:
    from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
    from envhub.task import EpisodeFailed, EpisodeTask
    from envhub.workers.calls import EnvironmentCalls
    from rlearner_text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / "tokenizer"))
    kinds = {}
    for name, files, args in (
        ("outage", {}, {"fails_after": 3}),
        ("bad", {"tests/test.sh": "#!/bin/sh\nexit 1\n"}, {}),
    ):
        folder = write_task(tmp_path / name, **files)
        env_args = {
            "path": str(folder),
            "images": {"*": "host"},
            "eval_share": 0.0,
            "form": "text",
            "provider": "folder_sandbox:FolderProvider",
            "provider_args": args,
        }
        play = domain("task", env_args=env_args, max_turns=16, max_context_tokens=2000,
                      sampling={"max_tokens": 300})  # fmt: skip
        policy = Scripted(tokenizer, lambda _: "<submit></submit>")
        runners = EpisodeRunners(
            tokenizer, policy, EnvironmentCalls(30.0), EpisodeLimits(60.0, 10.0)
        )
        task = EpisodeTask(
            id="hub.1", domain=play, task_index=0, split="train", seed=1, episode=0, min_version=1
        )
        try:
            with pytest.raises(EpisodeFailed) as caught:
                await asyncio.wait_for(runners.play(task, lambda _: None), 60)
        finally:
            await runners.close()
        kinds[name] = (caught.value.kind, caught.value.detail)
    assert kinds["outage"][0] == "machine"
    assert "the daemon of the sandboxes is gone" in kinds["outage"][1]
    assert kinds["bad"][0] == "fatal"
    assert "the tests wrote neither reward.txt nor reward.json" in kinds["bad"][1]
