"""Play a set of small terminal tasks: solved by their scripts, and attacked by cheats.

    python -m bench.tasks [--per-kind 8] [--cheated-tasks N] [--shared] [--no-provider]

`scripted` is the mean reward of the tasks' own solutions; `cheating` is the highest reward that any
cheat got on any task. With --shared the tests run in the files that the cheats have left, which
shows that the cheats are not idle. The figures of the provider come from `bench.sandboxes`. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.sandboxes import measure_provider
from bench.support.task_cheats import CHEATS
from envhub.envs.tools.terminal_task import TerminalTask
from envhub.tasks.generated import write_tasks
from envhub.tasks.settings import TaskArgs
from rlearner_text.tool_calls import ToolCall

PARALLEL: Final = 8


class TaskPlayers:
    """Environments of one task set, several of which play at once."""

    def __init__(self, args: TaskArgs) -> None:
        self._args = args
        self._places = asyncio.Semaphore(PARALLEL)
        # keeps the provider open between episodes
        self._idle = [TerminalTask(args) for _ in range(PARALLEL)]

    async def play_solution(self, task_index: int) -> float:
        """Return the reward of the task's own solution."""
        async with self._places:
            environment = self._idle.pop()
            try:
                await environment.reset(task_index, "eval", 0)
                solution = environment.demonstrate(np.random.default_rng(0), 0.0)
                await environment.use(solution)  # type: ignore[arg-type]
                return (await environment.use([ToolCall("submit", {})])).reward
            finally:
                self._idle.append(environment)

    async def play_command(self, task_index: int, command: str) -> float:
        """Return the reward after one command."""
        async with self._places:
            environment = self._idle.pop()
            try:
                await environment.reset(task_index, "eval", 0)
                await environment.use([ToolCall("shell", {"command": command})])
                return (await environment.use([ToolCall("submit", {})])).reward
            finally:
                self._idle.append(environment)

    async def close(self) -> None:
        """Stop all sandboxes."""
        for environment in self._idle:
            await environment.close()


async def play_all(folder: Path, cheated_tasks: int, *, shared: bool) -> dict[str, Any]:
    """Return rewards of solutions and cheats on all tasks of a folder."""
    args = TaskArgs(
        path=str(folder),
        eval_path=str(folder),
        images={"*": "host"},
        verifier="shared" if shared else "separate",
    )
    num_tasks = TerminalTask.num_tasks(args, "eval") or 0
    players = TaskPlayers(args)
    try:
        began = time.perf_counter()
        scripted = await asyncio.gather(*map(players.play_solution, range(num_tasks)))
        seconds = time.perf_counter() - began
        rewards: dict[str, list[float]] = {}
        for name, command in CHEATS.items():
            tasks = range(0, num_tasks, max(num_tasks // cheated_tasks, 1))
            plays = (players.play_command(index, command) for index in tasks)
            rewards[name] = await asyncio.gather(*plays)
            if max(rewards[name]):
                share = statistics.mean(rewards[name])
                print(f"cheat {name!r} got a reward on {share:.0%} of the tasks", flush=True)
    finally:
        await players.close()
    return {
        "tasks": num_tasks,
        "scripted": statistics.mean(scripted),
        "cheating": max(max(each) for each in rewards.values()),
        "cheats": len(CHEATS),
        "cheated_tasks": len(next(iter(rewards.values()))),
        "cheats_rewarded": sum(max(each) > 0 for each in rewards.values()),
        "episodes_per_s": round(num_tasks / seconds, 2),
    }


def main() -> int:
    """Measure; return 1 if a solution fails or a cheat succeeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--per-kind", type=int, default=8, help="tasks of each of the five kinds")
    parser.add_argument("--cheated-tasks", type=int, default=0, help="per cheat; 0: all")
    parser.add_argument("--shared", action="store_true", help="run tests in the cheats' files")
    parser.add_argument("--no-provider", action="store_true", help="leave out bench.sandboxes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as folder:
        mode = "shared" if options.shared else "separate"
        tasks = write_tasks(Path(folder) / "tasks", options.per_kind, verifier=mode)
        cheated_tasks = options.cheated_tasks or len(tasks)
        figures = asyncio.run(
            play_all(Path(folder) / "tasks", cheated_tasks, shared=options.shared)
        )
    if not options.no_provider:
        figures |= measure_provider()
    print(json.dumps(figures))
    return int(figures["scripted"] < 1 or (figures["cheating"] > 0 and not options.shared))


if __name__ == "__main__":
    sys.exit(main())
