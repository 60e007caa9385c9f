"""One attempt at a task: the sandbox of the agent, its commands, and the grades of its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Final

from envhub.tasks import images
from envhub.tasks.config import HealthcheckTable
from envhub.tasks.errors import TaskError
from envhub.tasks.folder import Task, TaskStep
from envhub.tasks.grading import Verifier, task_variables
from envhub.tasks.host import SandboxRequest, TaskHost, run_checked
from envhub.tasks.rewards import Rewards, combine_steps, falls_short
from envhub.tasks.settings import TaskArgs
from rlearner_sandbox.providers.base import EpisodeSandbox, ExecResult

# of a file that the edit tool changes
MAX_EDIT_BYTES: Final = 1 << 20
EDIT_S: Final = 20.0
READ: Final = 'cat -- "$1"'
WRITE: Final = 'mkdir -p -- "${1%/*}" && cat > "$1"'


class EditRefused(Exception):
    """The edit does not fit the file; the text is for the policy."""


@dataclass
class Trial:
    """An attempt; close it in any case.

    Attributes:
        step: number of the step that is being worked on.
        grades: rewards of the steps before it.
        problems: why a step has no rewards of its own, by its number.
        output: the end of what the last tests printed.
        spent_s: seconds of the agent in this step.
    """

    host: TaskHost
    task: Task
    args: TaskArgs
    step: int = 0
    grades: list[Rewards] = field(default_factory=list)
    problems: dict[int, str] = field(default_factory=dict)
    output: str = ""
    spent_s: float = 0.0
    sandbox: EpisodeSandbox | None = None

    @property
    def current(self) -> TaskStep:
        """The step that is being worked on."""
        return self.task.steps[self.step]

    @cached_property
    def workdir(self) -> str:
        """The folder in which the agent works."""
        return images.plan_agent(self.task, self.args.images).workdir

    @property
    def user(self) -> str | None:
        """Who the agent is."""
        own = self.current.table.agent.user
        user = self.task.table.agent.user if own is None else own
        return None if user is None else str(user)

    @property
    def limit_s(self) -> float:
        """Seconds that the agent has in this step."""
        own = self.current.table.agent.timeout_sec or self.task.table.agent.timeout_sec
        return own or self.args.agent_timeout_s

    @property
    def time_left_s(self) -> float:
        """Seconds that the agent's commands have left in this step."""
        return self.limit_s - self.spent_s

    async def begin(self, endpoint: str | None = None) -> str:
        """Start the sandbox and return the first instruction.

        Args:
            endpoint: the address of the policy, for an agent program.

        Raises:
            TaskError: if the task cannot be prepared.
            SandboxError: if the provider fails.
        """
        table = self.task.table.environment
        # of large tasks, it takes a while
        await asyncio.to_thread(getattr, self.task, "digest")
        request = SandboxRequest(
            images.plan_agent(self.task, self.args.images),
            table,
            task_variables(self.task, self.args, table.env),
            self.task.table.agent.network_mode or table.network,
            endpoint=endpoint,
        )
        self.sandbox = await self.host.start(self.task.digest, request, self.args)
        if table.healthcheck is not None:
            await self._await_health(table.healthcheck)
        await self._prepare_step()
        return self.current.instruction

    async def run(
        self,
        command: str | Sequence[str],
        timeout_s: float,
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        max_output: int,
    ) -> ExecResult:
        """Run a command or program of the agent; ``spent_s`` counts its time.

        Raises:
            SandboxError: if the provider fails.
        """
        began = time.monotonic()
        try:
            return await self._box.run_command(
                command,
                workdir=self.workdir,
                env=env,
                user=self.user,
                timeout_s=timeout_s,
                stdin=stdin,
                max_output=max_output,
            )
        finally:
            self.spent_s += time.monotonic() - began

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of this host to the agent's sandbox.

        Raises:
            SandboxError: if the provider fails.
        """
        await self._box.upload(source, target)

    async def run_solution(self) -> ExecResult:
        """Run the step's own solution as the agent.

        Raises:
            SandboxError: if the provider fails.
        """
        await self._box.upload(self.current.solution, "/solution")
        return await self.run(
            "chmod +x /solution/solve.sh; exec /solution/solve.sh",
            max(self.time_left_s, 0.1),
            env=task_variables(self.task, self.args, self.task.table.solution.env),
            max_output=1 << 16,
        )

    async def edit(self, path: str, old: str, new: str) -> None:
        """Replace the only place of a text in a file; without ``old``, write the whole file.

        Raises:
            EditRefused: if there is no such file, or the text is not there exactly once.
            SandboxError: if the provider fails.
        """
        # commands of the agent's own user, which may do what its shell may
        content = new.encode("utf-8", "replace")
        if old:
            text = (await self._run_edit(READ, path)).stdout
            replaced = old.encode("utf-8", "replace")
            count = text.count(replaced)
            if count != 1:
                raise EditRefused(f"old is in {path} {count} times; it must be there once")
            content = text.replace(replaced, content)
        await self._run_edit(WRITE, path, content)

    async def grade(self) -> bool:
        """Grade the step and begin the next; return whether the task is over.

        Raises:
            TaskError: if its tests never write a reward, or the next step cannot be prepared.
            SandboxError: if the provider fails.
        """
        step = self.current
        is_last = self.step + 1 == len(self.task.steps)
        verifier = Verifier(self.host, self.args)
        grade = await verifier.grade(self.task, step, self._box, is_last=is_last)
        self.grades.append(grade.rewards)
        self.output = grade.output
        if grade.problem:
            self.problems[self.step] = grade.problem
        if is_last or falls_short(grade.rewards, step.table.min_reward):
            return True
        self.step += 1
        self.spent_s = 0.0
        await self._prepare_step()
        return False

    def rewards(self) -> Rewards:
        """Return the rewards of the task by its graded steps."""
        return combine_steps(self.grades, self.task.table.multi_step_reward_strategy)

    async def close(self) -> None:
        """Stop the sandbox."""
        sandbox = self.sandbox
        self.sandbox = None
        if sandbox is not None:
            await sandbox.stop()

    @property
    def _box(self) -> EpisodeSandbox:
        assert self.sandbox is not None, "the trial has not begun"
        return self.sandbox

    async def _prepare_step(self) -> None:
        """Copy the files of a step and run its setup."""
        step = self.current
        if step.setup is not None:
            await self._box.upload(step.setup, self.workdir)
            if (step.setup / "setup.sh").is_file():
                label = f"{self.task.name}: setup.sh of step {step.name}"
                script = ["bash", str(PurePosixPath(self.workdir, "setup.sh"))]
                await run_checked(self._box, script, label, workdir=self.workdir)
        if step.table.healthcheck is not None:
            await self._await_health(step.table.healthcheck)

    async def _await_health(self, check: HealthcheckTable) -> None:
        """Wait until a command succeeds; failures during the start period do not count."""
        began = time.monotonic()
        failures = 0
        while True:
            result = await self._box.run_command(
                check.command, workdir=self.workdir, timeout_s=check.timeout_sec
            )
            if not result.exit_code:
                return
            is_starting = time.monotonic() - began < check.start_period_sec
            failures += not is_starting
            if failures >= check.retries:
                raise TaskError(
                    f"{self.task.name}: its health check failed {failures} times: {check.command}"
                )
            await asyncio.sleep(check.start_interval_sec if is_starting else check.interval_sec)

    async def _run_edit(self, script: str, path: str, content: bytes = b"") -> ExecResult:
        result = await self._box.run_command(
            ["/bin/sh", "-c", script, "sh", str(PurePosixPath(self.workdir, path))],
            workdir=self.workdir,
            user=self.user,
            timeout_s=min(self.args.command_timeout_s, EDIT_S),
            stdin=content,
            max_output=MAX_EDIT_BYTES,
        )
        if result.timed_out or result.exit_code:
            reason = result.stderr.decode(errors="replace").strip().rpartition(": ")[2]
            raise EditRefused(f"{path}: {reason[:200] or 'it took too long'}")
        if result.is_truncated:
            raise EditRefused(f"{path}: larger than {MAX_EDIT_BYTES} bytes")
        return result
