"""Grades what an agent left behind, in a sandbox that it has never been in.

The trust boundary is the verifier's sandbox. Its system, interpreters and libraries come from the
task's own image; tests and ``/logs/verifier`` exist nowhere else; of the agent's sandbox only the
working folder and the declared artifacts cross over, as plain files. So neither a changed PATH, an
overwritten interpreter, a link, nor a process that survives has any effect. What remains is code of
the agent that the tests themselves execute: it has their rights. A task avoids that by a hook
(``[[verifier.collect]]``), which runs such code in the agent's sandbox and leaves its output as an
artifact.

Tests that write no reward are the task's fault only if they write none where nobody has done
anything, which is tried once; else the policy has broken them, and gets the lowest reward.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from envhub.tasks import images
from envhub.tasks.config import CollectTable, artifact_entries, resolve_variables
from envhub.tasks.errors import TaskError
from envhub.tasks.folder import Task, TaskStep
from envhub.tasks.host import SandboxRequest, TaskHost, run_checked
from envhub.tasks.rewards import MAX_BYTES, NOTHING, BadReward, Rewards, parse_rewards
from envhub.tasks.settings import TaskArgs, plain_values
from envhub.tasks.work import (
    UncopiedWork,
    WorkPart,
    collect_work,
    is_agents_fault,
    place_work,
)
from rlearner_sandbox.providers.base import EpisodeSandbox, SandboxError

# a login shell, a user's packages and bytecode next to the agent's files are not the tests' affair
SAFE_ENV: Final = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
OUTPUT_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class Grade:
    """The result of a step's tests.

    Attributes:
        output: the end of what they printed.
        problem: why there are no rewards of their own; empty if there are.
    """

    rewards: Rewards
    output: str = ""
    problem: str = ""


def task_variables(task: Task, args: TaskArgs, values: dict[str, str]) -> dict[str, str]:
    """Return variables of a task with the run's values.

    Raises:
        TaskError: if one has no value.
    """
    try:
        return resolve_variables(values, plain_values(args.env, "env"))
    except KeyError as error:
        name = error.args[0]
        raise TaskError(
            f"{task.name}: ${{{name}}} has no value; give env_args.env.{name}"
        ) from None


class Verifier:
    """Runs the tests of tasks.

    Args:
        host: starts their sandboxes.
    """

    def __init__(self, host: TaskHost, args: TaskArgs) -> None:
        self._host = host
        self._args = args

    async def grade(
        self, task: Task, step: TaskStep, agent: EpisodeSandbox, *, is_last: bool
    ) -> Grade:
        """Grade a step; the agent's sandbox is stopped after the last.

        Raises:
            TaskError: if the tests write no reward whatever the agent does, or a hook fails.
            SandboxError: if the provider fails.
        """
        for hook in (*task.table.verifier.collect, *_own(task, step.table.verifier.collect)):
            # what the agent left may break it: then the tests find no artifact
            await agent.run_command(hook.command, user=_user(hook.user), timeout_s=hook.timeout_sec)
        if self._args.verifier == "shared" and not self._is_separate(task, step):
            grade = await self._run_shared(task, step, agent)
        else:
            with tempfile.TemporaryDirectory(prefix="rlearner-task-") as folder:
                try:
                    parts = await self._collect(task, step, agent, Path(folder), is_last=is_last)
                    grade = await self._run_separate(task, step, parts)
                except UncopiedWork as error:
                    return Grade(NOTHING, problem=str(error))
                except SandboxError as error:
                    if not is_agents_fault(error):
                        raise
                    return Grade(NOTHING, problem=str(error))
        if grade.problem and not await self._has_working_tests(task, step):
            raise TaskError(f"{task.name}: {grade.problem}{_last_line(grade.output)}")
        return grade

    async def _collect(
        self, task: Task, step: TaskStep, agent: EpisodeSandbox, folder: Path, *, is_last: bool
    ) -> list[WorkPart]:
        """Copy what crosses over, from a copy of the agent's sandbox that has no processes."""
        remains = await agent.fork()
        try:
            if is_last:
                await agent.stop()
            return await collect_work(
                remains,
                images.plan_agent(task, self._args.images).workdir,
                artifact_entries(task.table.artifacts, step.table.artifacts),
                folder,
                self._args.max_artifacts_mib,
            )
        finally:
            await remains.stop()

    async def _has_working_tests(self, task: Task, step: TaskStep) -> bool:
        """Return whether the tests write a reward where no agent has been; tried once."""
        key = f"{task.digest}/{step.name}"
        control = self._host.controls.get(key)
        if control is None or (control.done() and (control.cancelled() or control.exception())):
            control = asyncio.create_task(self._run_control(task, step))
            self._host.controls[key] = control
        return await asyncio.shield(control)

    async def _run_control(self, task: Task, step: TaskStep) -> bool:
        return not (await self._run_separate(task, step, ())).problem

    def _is_separate(self, task: Task, step: TaskStep) -> bool:
        return (step.table.verifier.mode or task.table.verifier.mode) == "separate"

    def _request(self, task: Task, step: TaskStep) -> SandboxRequest:
        """Return what the verifier of a step begins with."""
        plan = None
        table = task.table.environment
        if self._is_separate(task, step):
            table = step.table.verifier.environment or task.table.verifier.environment or table
            for tests in reversed(step.tests):
                plan = plan or images.plan_verifier(task, tests, self._args.images)
        mode = step.table.verifier.network_mode or task.table.verifier.network_mode
        return SandboxRequest(
            plan or images.plan_agent(task, self._args.images),
            table,
            {**task_variables(task, self._args, table.env), **SAFE_ENV},
            mode or table.network,
        )

    async def _run_separate(self, task: Task, step: TaskStep, parts: Sequence[WorkPart]) -> Grade:
        request = self._request(task, step)
        own = request.plan.context != task.folder / "environment"
        key = f"{task.digest}/{step.name}/tests" if own else task.digest
        sandbox = await self._host.start(key, request, self._args)
        try:
            await place_work(sandbox, parts)
            return await self._run_tests(task, step, sandbox)
        finally:
            await sandbox.stop()

    async def _run_shared(self, task: Task, step: TaskStep, agent: EpisodeSandbox) -> Grade:
        """Run the tests in a copy of the agent's files, without its processes."""
        image = await agent.snapshot()
        sandbox = await self._host.restart(image, self._request(task, step), self._args)
        try:
            await run_checked(sandbox, ["rm", "-rf", "/logs/verifier", "/tests"], "the old tests")
            await run_checked(sandbox, ["mkdir", "-p", "/logs/verifier"], "/logs/verifier")
            return await self._run_tests(task, step, sandbox)
        finally:
            await sandbox.stop()

    async def _run_tests(self, task: Task, step: TaskStep, sandbox: EpisodeSandbox) -> Grade:
        for folder in step.tests:
            await sandbox.upload(folder, "/tests")
        await run_checked(sandbox, "chmod +x /tests/test.sh && mkdir -p /logs/verifier", "tests")
        table = step.table.verifier
        values = {**task.table.verifier.env, **table.env}
        timeout_s = verifier_timeout_s(task, step)
        result = await sandbox.run_command(
            # by a shell: a script whose interpreter is missing is a test that fails
            "/tests/test.sh",
            env=task_variables(task, self._args, values),
            user=_user(table.user if table.user is not None else task.table.verifier.user),
            timeout_s=timeout_s,
            max_output=OUTPUT_BYTES,
        )
        output = (result.stdout + result.stderr).decode(errors="replace")
        if result.timed_out:
            problem = f"the tests did not end within verifier.timeout_sec, {timeout_s:g} s"
            return Grade(NOTHING, output, problem)
        try:
            rewards = parse_rewards(
                await _read_file(sandbox, "/logs/verifier/reward.json"),
                await _read_file(sandbox, "/logs/verifier/reward.txt"),
            )
        except BadReward as error:
            return Grade(NOTHING, output, str(error))
        return Grade(rewards, output)


def verifier_timeout_s(task: Task, step: TaskStep) -> float:
    """Return the seconds that a step's tests have."""
    table = step.table.verifier
    if "timeout_sec" in table.model_fields_set:
        return table.timeout_sec
    return task.table.verifier.timeout_sec


def longest_grading_s(task: Task) -> float:
    """Return the seconds that the tests and hooks of one step take at most, tried twice."""
    longest = 0.0
    for step in task.steps:
        hooks = (*task.table.verifier.collect, *_own(task, step.table.verifier.collect))
        hooks_s = sum(hook.timeout_sec for hook in hooks)
        longest = max(longest, hooks_s + 2 * verifier_timeout_s(task, step))
    return longest


def _own(task: Task, hooks: Sequence[CollectTable]) -> Sequence[CollectTable]:
    """Return the hooks of a step, which for a task of one step are the task's."""
    return hooks if task.table.steps else ()


def _user(user: str | int | None) -> str | None:
    return None if user is None else str(user)


async def _read_file(sandbox: EpisodeSandbox, path: str) -> bytes | None:
    """Return a small regular file of a sandbox, None if there is none."""
    with tempfile.TemporaryDirectory(prefix="rlearner-task-") as folder:
        copy = Path(folder) / "copy"
        try:
            await sandbox.download(path, copy, max_bytes=MAX_BYTES)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise BadReward(f"{path}: {error}") from None
        with contextlib.suppress(IsADirectoryError):
            return copy.read_bytes()
        raise BadReward(f"{path} is a folder")


def _last_line(output: str) -> str:
    line = next((line for line in reversed(output.splitlines()) if line.strip()), "")
    return f"; they printed {line.strip()[:200]!r} last" if line else ""
