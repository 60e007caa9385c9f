"""Plays a task in Harbor's format by an agent program, which runs in the task's sandbox.

The program gets its instruction as ``{instruction}`` in its arguments and on stdin, and the address
and key of its episode in the same variables as ``env: agent``. It reaches nothing else. Its exit
status has no meaning: when it has ended, or its time is over, the tests grade what it left.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from envhub.agents.result import AgentResult, ProgramOutcome
from envhub.agents.session import AgentSession
from envhub.task import EpisodeFailed, EpisodeTask
from envhub.tasks.errors import TaskError
from envhub.tasks.rewards import BadReward, scalar_reward
from envhub.tasks.settings import TaskArgs, plain_values
from envhub.tasks.shared_host import acquire_host, release_host
from envhub.tasks.splits import pick_task
from envhub.tasks.trial import Trial
from rlearner_sandbox.providers.base import ExecResult, SandboxError

# between two looks at the time that the program itself has used
LOOK_S: Final = 1.0
# of a program that waits for the policy: its own time is counted here
NO_LIMIT_S: Final = 1e6
OUTPUT_BYTES: Final = 1 << 16


async def play_task(
    task: EpisodeTask, session: AgentSession, address: str, variables: Mapping[str, str]
) -> ProgramOutcome:
    """Run the program for each step of a task and return its grade.

    Args:
        address: of the policy's endpoint.
        variables: of the program: address, key and model.

    Raises:
        EpisodeFailed: if the sandbox fails, no server answered the program, it never called the
            policy, or the task cannot be graded.
    """
    args = task.domain.args
    assert isinstance(args, TaskArgs)
    parts = urlsplit(address)
    user = object()
    trial = Trial(acquire_host(user, args), pick_task(args, task.split, task.task_index), args)
    try:
        prompt = await trial.begin(endpoint=f"{parts.scheme}://{parts.netloc}")
        for target, source in args.agent_files.items():
            await trial.upload(Path(source), target)
        env = {**plain_values(args.agent_env, "agent_env"), **variables}
        is_over = False
        while not is_over:
            program_exit = await _run_program(trial, session, args, env)
            _check_calls(session, program_exit)
            is_over = await trial.grade()
        return ProgramOutcome(_read_result(trial), prompt, row={"task": trial.task.name})
    except SandboxError as error:
        raise EpisodeFailed("machine", str(error)) from error
    except TaskError as error:
        raise EpisodeFailed("fatal", str(error)) from error
    finally:
        await trial.close()
        await release_host(user, args)


async def _run_program(
    trial: Trial, session: AgentSession, args: TaskArgs, env: Mapping[str, str]
) -> ExecResult | None:
    """Return how the program ended; None if its time was over."""
    instruction = trial.current.instruction
    command = [word.replace("{instruction}", instruction) for word in args.agent]
    began_s = time.monotonic()
    before_s = session.generate_s
    running = asyncio.ensure_future(
        trial.run(
            # by a shell: a program that is not there is one that fails
            ["/bin/sh", "-c", 'exec "$@"', "sh", *command],
            NO_LIMIT_S,
            env=env,
            stdin=instruction.encode(),
            max_output=OUTPUT_BYTES,
        )
    )
    try:
        while True:
            waited_s = session.generate_s - before_s
            left_s = trial.limit_s - (time.monotonic() - began_s - waited_s)
            if left_s <= 0 and not session.num_pending:
                return None
            await asyncio.wait({running}, timeout=max(min(left_s, LOOK_S), 0.05))
            if running.done():
                return running.result()
    finally:
        if not running.done():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _check_calls(session: AgentSession, program_exit: ExecResult | None) -> None:
    """Refuse an episode whose program could not do its work.

    Raises:
        EpisodeFailed: if no server answered its last call, or it made none.
    """
    if session.failure:
        raise EpisodeFailed("generate", session.failure)
    if session.record.samples:
        return
    if session.refusal == "length":
        limit = session.served_model.max_context_tokens
        raise EpisodeFailed(
            "fatal", f"the agent's first prompt exceeds max_context_tokens, which is {limit}"
        )
    ending = "was stopped when its time was over"
    if program_exit is not None:
        lines = program_exit.stderr.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        ending = f"ended with exit code {program_exit.exit_code}: {last[:300]}"
    raise EpisodeFailed("env", f"the agent {ending}, without a call to the policy")


def _read_result(trial: Trial) -> AgentResult:
    """Return the grade as a program's result.

    Raises:
        TaskError: if the tests gave no reward of the configured name.
    """
    try:
        reward = scalar_reward(trial.rewards(), trial.args.reward)
    except BadReward as error:
        if not trial.problems:
            raise TaskError(f"{trial.task.name}: {error}") from None
        reward = 0.0
    metrics = {"broken_tests": float(len(trial.problems))}
    return AgentResult(reward, success=reward >= 1, metrics=metrics)
