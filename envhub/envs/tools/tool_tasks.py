"""``env: tools``: tasks to solve with tools of MCP servers, Python functions and HTTP APIs.

    env: tools
    env_args:
      path: tasks.jsonl
      tools:
        files: {kind: mcp, args: {command: [python, files_server.py]}}
        wiki: {kind: mcp, shared: true, args: {url: "https://host/mcp"}}
        sums: {kind: functions, args: {functions: ["./tools.py:add"]}}

The chat template shows the tools to the policy. A turn may call several; their results are one
observation. A turn without a call is the answer, or its last ``<answer>…</answer>``: it ends the
episode and is compared with the reference.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from broker.errors import ConfigError, NotInstalled
from broker.settings.config import DomainSection
from broker.settings.schema.hubs import EnvhubSection
from envhub.envs.base import Observation, Split, StepResult
from envhub.envs.text.answers import tagged
from envhub.envs.text.asked import QuestionEnvironment
from envhub.envs.text.qa import QuestionAnswerArgs
from envhub.envs.tool_sources.base import SourceFailed, ToolResult, ToolSpec
from envhub.envs.tool_sources.schemas import require_package
from envhub.envs.tool_sources.toolbox import (
    SourceSection,
    Toolbox,
    check_source,
    list_tools,
    load_source,
)
from envhub.envs.tools import tool_calls
from rlearner_text.tool_calls import ToolCall

# that a turn may take beyond timeout_s: to see whether a server that is late lives, and to end it
ANSWER_S: Final = 6.0
# by the arguments' text: of this process, since the last check
_listed: Final[dict[str, list[ToolSpec]]] = {}


class ToolTaskArgs(QuestionAnswerArgs):
    """``env_args`` of ``tools``; those of ``qa`` name the file of tasks."""

    harmless = None  # its tools are programs and addresses that the run's owner names

    # sources by name
    tools: Annotated[dict[str, SourceSection], Field(min_length=1)]
    timeout_s: PositiveFloat = 20.0  # for the calls of a turn together
    output_chars: PositiveInt = 4000  # of each result; longer ones are cut, with a mark
    max_calls: PositiveInt = 32  # in an episode; further ones do not run
    # of the answer: exact match, F1 of the words; none: reward functions score it
    score: Literal["exact", "f1", "none"] = "exact"
    # taken from the reward for a turn with a call that is not valid
    format_penalty: NonNegativeFloat = 0.0

    def __hash__(self) -> int:
        # arguments of sources are dictionaries
        return hash(self.model_dump_json())


class ToolTasks(QuestionEnvironment):
    """One task at a time."""

    Args = ToolTaskArgs
    isolation = "none"  # it only waits for processes and servers

    args: ToolTaskArgs

    def __init__(self, args: ToolTaskArgs) -> None:
        super().__init__(args)
        self._toolbox = Toolbox(args.tools, _specs(args))

    @classmethod
    def check(cls, args: ToolTaskArgs) -> None:
        require_package()
        super().check(args)
        for name, section in args.tools.items():
            check_source(name, section)
        # a server may have changed since the last check
        _listed.pop(args.model_dump_json(), None)
        try:
            _specs(args)
        except SourceFailed as error:
            raise ConfigError("tools", sorted(args.tools), f"tools that work: {error}") from None

    @classmethod
    def check_domain(
        cls, args: ToolTaskArgs, section: DomainSection, envhub: EnvhubSection
    ) -> None:
        """Check that a hub waits longer for a step than a step for its calls."""
        most_s = envhub.step_timeout_s - ANSWER_S
        if args.timeout_s > most_s:
            allowed = f"at most envhub.step_timeout_s - {ANSWER_S:g}, which is {most_s:g}"
            raise ConfigError("env_args.timeout_s", args.timeout_s, allowed)

    @classmethod
    def data_files(cls, args: ToolTaskArgs) -> list[str]:
        files = super().data_files(args)
        for name, section in args.tools.items():
            source = load_source(name, section).make()
            files += source.data_files(source.args)
        return list(dict.fromkeys(files))

    @classmethod
    def tools(cls, args: ToolTaskArgs) -> list[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {
                    "name": spec.name,
                    "description": spec.description,
                    "parameters": spec.parameters,
                },
            }
            for spec in _specs(args)
        ]

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        with contextlib.suppress(ImportError):
            import jsonschema  # noqa: F401

            file = folder / "tools.py"
            source = 'def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n'
            file.write_text(source, encoding="utf-8")
            tasks = folder / "tasks.jsonl"
            rows = (f'{{"question": "{n} + {n} = ?", "answer": "{2 * n}"}}\n' for n in range(20))
            tasks.write_text("".join(rows), encoding="utf-8")
            tools = {"sums": {"kind": "functions", "args": {"functions": [f"{file}:add"]}}}
            return {"path": str(tasks), "eval_share": 0.2, "tools": tools}
        raise NotInstalled("environment tools: jsonschema is not installed")

    async def reset(  # type: ignore[override]
        self, task_index: int, split: Split, seed: int
    ) -> Observation:
        """Show the task, and start the sources that are not shared."""
        await self._toolbox.open()
        return super().reset(task_index, split, seed)

    async def use(self, calls: Sequence[ToolCall]) -> StepResult:
        """Run the calls in their order."""
        until = time.monotonic() + self.args.timeout_s
        results = []
        is_valid = True
        for call in calls:
            if self._num_calls >= self.args.max_calls:
                results.append(ToolResult("no more calls are run", is_error=True))
                continue
            self._num_calls += 1
            result, valid_call = await self._toolbox.call(
                call.name, call.arguments, until, self.args.output_chars
            )
            is_valid = is_valid and valid_call
            self._num_errors += result.is_error
            results.append(result)
        texts = [f"error: {result.text}" if result.is_error else result.text for result in results]
        if len(texts) > 1:
            pairs = zip(calls, texts, strict=True)
            texts = [
                f"{number}. {call.name}: {text}" for number, (call, text) in enumerate(pairs, 1)
            ]
        reward = 0.0 if is_valid else -self.args.format_penalty
        observation = self._show("\n".join(texts))
        return StepResult(observation, reward, False, is_valid, metrics=self._metrics())

    def step(self, text: str) -> StepResult:
        """End with an answer."""
        answer = tagged(text, answer_tag=True) or text.strip()
        self._toolbox.end_episode()
        reward = 0.0
        is_right = False
        if self.args.score != "none":
            reward, is_right = tool_calls.scored(answer, (self.reference,), self.args.score)
        self._show(answer)
        metrics = self._metrics()
        return StepResult(Observation(""), reward, True, bool(answer), is_right, metrics=metrics)

    async def close(self) -> None:
        """End the sources."""
        await self._toolbox.close()

    def _begin(self) -> None:
        self._num_calls = 0
        self._num_errors = 0

    def _metrics(self) -> dict[str, float]:
        return {"calls": float(self._num_calls), "call_errors": float(self._num_errors)}


def _specs(args: ToolTaskArgs) -> list[ToolSpec]:
    """Return the tools of all sources, which are started for it once."""
    key = args.model_dump_json()
    if key not in _listed:
        _listed[key] = list_tools(args.tools)
    return _listed[key]
