"""``env: task``: tasks in Harbor's format, solved in a terminal and graded by hidden tests.

    domains:
      terminal:
        env: task
        env_args: {path: tasks, images: {"*": host}}
        max_turns: 16

The policy sees the instruction and calls ``shell``, ``edit`` and ``submit``; with ``form: text`` it
writes ``<shell>…</shell>`` and ``<submit></submit>``. Commands run in a sandbox, each in a shell of
its own, and their output is cut in the middle. ``submit``, or the last of ``max_steps`` turns,
grades the work: see ``envhub.tasks.grading``. An outage of the sandbox is raised, never graded.

With ``agent: [program, …]`` that program solves the task instead, see
``envhub.agents.task_program``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.errors import ConfigError, NotInstalled, UserError
from broker.settings.config import DomainSection
from broker.settings.schema.hubs import EnvhubSection
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.tasks import splits
from envhub.tasks.errors import TaskError
from envhub.tasks.folder import TEST, Task, read_task
from envhub.tasks.grading import longest_grading_s
from envhub.tasks.providers import check_provider
from envhub.tasks.rewards import BadReward, scalar_reward
from envhub.tasks.settings import TaskArgs
from envhub.tasks.shared_host import acquire_host, release_host
from envhub.tasks.trial import EditRefused, Trial
from rlearner_sandbox.providers.base import ExecResult
from rlearner_text.tool_calls import ToolCall

SHELL: Final = "shell"
EDIT: Final = "edit"
SUBMIT: Final = "submit"
SHELL_DESCRIPTION: Final = (
    "Run a command with sh in the working folder, in a shell of its own; returns its output."
)
EDIT_DESCRIPTION: Final = (
    "Replace the text old, which the file has exactly once, by new; with an empty old, write new "
    "as the whole file."
)
SUBMIT_DESCRIPTION: Final = "End your work; it is then graded."
HINT: Final = {
    "calls": f"Call {SHELL}, {EDIT} or {SUBMIT}.",
    "text": f"Write <{SHELL}>a command</{SHELL}>, or <{SUBMIT}></{SUBMIT}> when you are done.",
}
# an unclosed tag extends to the end, as servers omit the stop string at which they stop
_TAG: Final = re.compile(rf"<({SHELL}|{SUBMIT})>(.*?)(?:</\1>|\Z)", re.DOTALL)
# harmless commands that a solver with noise tries
_IDLE: Final = ("ls", "pwd", "ls -la", "cat *", "true")
# of a command's output: more than is shown, so that its end is among it
READ_BYTES: Final = 1 << 20
# to start a sandbox, and to copy what the tests get
OVERHEAD_S: Final = 10.0


class TerminalTask(Environment):
    """One task at a time; its sandbox lives as long as the episode."""

    Args = TaskArgs
    isolation = "none"  # its methods only wait: what the policy writes runs in the sandbox

    args: TaskArgs

    def __init__(self, args: TaskArgs) -> None:
        super().__init__(args)
        self._trial: Trial | None = None
        self._steps = 0
        self._shown = ""
        self._commands = 0

    @classmethod
    def check(cls, args: TaskArgs) -> None:
        splits.check_tasks(args)
        check_provider(args)
        for target, source in args.agent_files.items():
            if not target.startswith("/"):
                raise ConfigError(f"agent_files.{target}", source, "a path that begins with /")
            if not Path(source).exists():
                raise ConfigError(f"agent_files.{target}", source, "a file or folder that is there")

    @classmethod
    def check_domain(cls, args: TaskArgs, section: DomainSection, envhub: EnvhubSection) -> None:
        """Check that the domain lets every episode be graded."""
        if args.agent and section.context != "steps":
            allowed = "steps with env_args.agent: its calls may begin another sample"
            raise ConfigError("context", section.context, allowed)
        if not args.agent and section.max_turns < args.max_steps:
            allowed = (
                f"at least env_args.max_steps, which is {args.max_steps}: an episode that ends "
                "before is not graded"
            )
            raise ConfigError("max_turns", section.max_turns, allowed)
        if section.isolation not in (None, "none"):
            raise ConfigError("isolation", section.isolation, "none: it has sandboxes of its own")
        for folder in {*splits.split_tasks(args, "train"), *splits.split_tasks(args, "eval")}:
            grading_s = longest_grading_s(read_task(folder)) + OVERHEAD_S
            if grading_s > envhub.step_timeout_s and not args.agent:
                allowed = f"at least {grading_s:g}, which grading {folder.name} may take (twice)"
                raise ConfigError("envhub.step_timeout_s", envhub.step_timeout_s, allowed)
        if args.command_timeout_s + OVERHEAD_S > envhub.step_timeout_s:
            allowed = f"at most {envhub.step_timeout_s - OVERHEAD_S:g}: envhub.step_timeout_s"
            raise ConfigError("env_args.command_timeout_s", args.command_timeout_s, allowed)

    @classmethod
    def data_files(cls, args: TaskArgs) -> list[str]:
        names = ("task.toml", "instruction.md", f"tests/{TEST}", "environment/Dockerfile")
        return [
            str(folder / name)
            for split in ("train", "eval")
            for folder in splits.split_tasks(args, split)
            for name in names
            if (folder / name).is_file()
        ]

    @classmethod
    def num_tasks(cls, args: TaskArgs, split: Split) -> int | None:
        return len(splits.split_tasks(args, split))

    @classmethod
    def task_keys(cls, args: TaskArgs) -> list[bytes] | None:
        count = len(splits.split_tasks(args, "train"))
        tasks = (splits.pick_task(args, "train", index) for index in range(count))
        return [bytes.fromhex(task.digest[:16]) for task in tasks]

    @classmethod
    def task_rows(cls, args: TaskArgs) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for folder in splits.split_tasks(args, "train"):
            yield str(folder), _row_of(read_task(folder))

    @classmethod
    def tools(cls, args: TaskArgs) -> list[dict[str, Any]]:
        if args.form == "text" or args.agent:
            return []
        text = {"type": "string"}
        return [
            _function(SHELL, SHELL_DESCRIPTION, {"command": text}),
            _function(EDIT, EDIT_DESCRIPTION, {"path": text, "old": text, "new": text}),
            _function(SUBMIT, SUBMIT_DESCRIPTION, {}),
        ]

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        from envhub.tasks.generated import write_tasks

        if shutil.which("bwrap") is None:
            raise NotInstalled("environment task: there is no bubblewrap (bwrap) on PATH")
        write_tasks(folder / "tasks")
        return {
            "path": str(folder / "tasks"),
            "images": {"*": "host"},
            "form": "text",
            "max_steps": 4,
            "eval_share": 0.25,
        }

    async def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        """Start the sandbox of a task and show its instruction; the seed has no effect."""
        await self._end_trial()
        task = splits.pick_task(self.args, split, task_index)
        self._steps = self._commands = 0
        self._trial = Trial(acquire_host(self, self.args), task, self.args)
        self.prompt = await self._trial.begin()
        self.row = _row_of(task)
        return self._show(self.prompt)

    async def step(self, text: str) -> StepResult:
        match = _TAG.search(text) if self.args.form == "text" else None
        if match is None:
            return await self._advance(HINT[self.args.form], is_valid=False)
        if match[1] == SUBMIT:
            return await self._grade()
        command = match[2].strip()
        if not command:
            return await self._advance(HINT[self.args.form], is_valid=False)
        return await self._advance(await self._run(command))

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        """Call tools in order; what comes after ``submit`` is not called."""
        outputs = []
        is_valid = True
        for call in calls:
            if call.name == SUBMIT:
                return await self._grade()
            try:
                outputs.append(await self._call(call))
            except EditRefused as error:
                outputs.append(f"error: {error}")
            except _BadCallError as error:
                outputs.append(f"error: {error}")
                is_valid = False
        return await self._advance("\n".join(outputs), is_valid=is_valid)

    def text_frame(self) -> str:
        return self._shown

    def demonstrate(self, rng: np.random.Generator, noise: float) -> str | Sequence[ToolCall]:
        """Return the task's own solution as one command, then ``submit``."""
        assert self._trial is not None, "reset comes first"
        solution = read_solution(self._trial.current.solution)
        if self._commands:
            return "<submit></submit>" if self.args.form == "text" else [ToolCall(SUBMIT, {})]
        command = solution
        if rng.random() < noise:
            command = str(rng.choice(_IDLE))
        if self.args.form == "text":
            return f"<{SHELL}>{command}</{SHELL}>"
        return [ToolCall(SHELL, {"command": command})]

    async def close(self) -> None:
        """Stop the sandbox; the last environment of a hub closes their provider."""
        await self._end_trial()
        await release_host(self, self.args)

    async def _end_trial(self) -> None:
        trial = self._trial
        self._trial = None
        if trial is not None:
            await trial.close()

    async def _call(self, call: ToolCall) -> str:
        arguments = call.arguments
        for name, value in arguments.items():
            if not isinstance(value, str):
                raise _BadCallError(f"{call.name}: {name} is not a text")
        if call.name == SHELL:
            if not arguments.get("command", "").strip():
                raise _BadCallError(f"{SHELL} needs a command")
            return await self._run(arguments["command"])
        if call.name != EDIT:
            raise _BadCallError(f"there is no tool {call.name[:40]!r}; {HINT['calls']}")
        path = _clean(arguments.get("path", ""))
        if not path or "new" not in arguments:
            raise _BadCallError(f"{EDIT} needs path and new")
        await self._running.edit(path, arguments.get("old", ""), arguments["new"])
        self._commands += 1
        return f"{path} is written"

    async def _run(self, command: str) -> str:
        self._commands += 1
        trial = self._running
        timeout_s = max(min(self.args.command_timeout_s, trial.time_left_s), 0.1)
        result = await trial.run(_clean(command), timeout_s, max_output=READ_BYTES)
        return render_output(result, self.args)

    async def _advance(self, text: str, *, is_valid: bool = True) -> StepResult:
        """Count a turn; after the last, or when its time is over, grade the work."""
        self._steps += 1
        if self._steps >= self.args.max_steps or self._running.time_left_s <= 0:
            return await self._grade(is_cut=True, is_valid=is_valid)
        penalty = 0.0 if is_valid else self.args.format_penalty
        shown = self._show(text)
        return StepResult(shown, -penalty, done=False, valid=is_valid, metrics=self._metrics())

    async def _grade(self, *, is_cut: bool = False, is_valid: bool = True) -> StepResult:
        """Grade the step; the next one goes on, unless the policy's turns are over."""
        trial = self._running
        is_over = await trial.grade()
        if not is_over and self._steps < self.args.max_steps:
            self._steps += 1
            self._commands = 0
            shown = self._show(trial.current.instruction)
            return StepResult(shown, 0.0, done=False, valid=is_valid, metrics=self._metrics())
        rewards = trial.rewards()
        try:
            reward = scalar_reward(rewards, self.args.reward)
        except BadReward as error:
            if not trial.problems:
                raise TaskError(f"{trial.task.name}: {error}") from None
            reward = 0.0
        metrics = self._metrics() | {
            f"verifier_{name}": value
            for name, value in rewards.items()
            if name != self.args.reward and name.isidentifier() and len(name) <= 64
        }
        metrics["broken_tests"] = float(len(trial.problems))
        self._shown = f"reward {reward:g}"
        await self._end_trial()
        return StepResult(
            Observation(""),
            reward,
            done=True,
            valid=is_valid,
            success=reward >= 1,
            truncated=is_cut,
            metrics=metrics,
        )

    @property
    def _running(self) -> Trial:
        assert self._trial is not None, "the episode is over"
        return self._trial

    def _metrics(self) -> dict[str, float]:
        return {"commands": float(self._commands)}

    def _show(self, text: str) -> Observation:
        self._shown = text
        return Observation(text)


class _BadCallError(Exception):
    """The call does not fit the tool; the text is for the policy."""


def render_output(result: ExecResult, args: TaskArgs) -> str:
    """Return what the policy sees of a command: its output, cut in the middle, and how it ended."""
    text = (result.stdout + result.stderr).decode(errors="replace").replace("\0", "").rstrip("\n")
    if len(text) > args.output_chars:
        half = args.output_chars // 2
        cut = f"{len(text) - 2 * half} characters" if not result.is_truncated else "the rest"
        text = f"{text[:half]}\n[… {cut} cut …]\n{text[-half:]}"
    if result.timed_out:
        return f"{text}\n[killed: its time was over]".lstrip("\n")
    if result.exit_code:
        return f"{text}\n[exit code {result.exit_code}]".lstrip("\n")
    return text or "[no output]"


def read_solution(folder: Path) -> str:
    """Return the commands of ``solve.sh``, without comments and options of the shell.

    Raises:
        UserError: if the task has none.
    """
    script = folder / "solve.sh"
    if not script.is_file():
        raise UserError(f"{script}: there is no such file, so nothing can be demonstrated")
    lines = script.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(("#", "set -")) and line.strip()]
    return "\n".join(kept)


def _row_of(task: Task) -> dict[str, Any]:
    return {"task": task.name}


def _function(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    required = [each for each in properties if each != "old"]
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _clean(text: str) -> str:
    """Return a text that can be an argument of a program: a model may write anything."""
    return text.replace("\0", "").encode(errors="replace").decode()
