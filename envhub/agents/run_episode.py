"""Plays episodes of agents: one endpoint per hub, on loopback, a key and a program per episode."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from broker.contract import wire
from broker.errors import UserError
from envhub.agents import program
from envhub.agents.record import RecordedSample
from envhub.agents.result import AgentResult, BadResult, ProgramOutcome, read
from envhub.agents.session import AgentSession, SessionContext
from envhub.agents.task_program import play_task
from envhub.envs import agent as agent_env
from envhub.envs.agent import AgentArgs
from envhub.envs.plain_row import fitting_columns
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask
from envhub.workers.sandboxed import sandboxed_command, sandboxed_start
from rlearner_text.openai import api_keys
from rlearner_text.openai.callers import Caller
from rlearner_text.openai.connections import Limits
from rlearner_text.openai.server import HttpServer
from rlearner_text.tokenizer import Tokenizer
from rlearner_workers.environment import worker_environment

log = logging.getLogger(__name__)

# all agents of a hub have the same address
AGENT_LIMITS = Limits(total=8192, per_peer=8192)


class AgentRunner:
    """The endpoint of one hub and its episodes.

    Args:
        tokenizer: of the policy.
        passed: environment variables of the hub that agents get besides the harmless ones.
    """

    def __init__(self, tokenizer: Tokenizer, passed: Sequence[str] = ()) -> None:
        self._passed = passed
        self._server = HttpServer(
            tokenizer, self._find_caller, lambda: ("serving", -1), AGENT_LIMITS
        )
        self._sessions: dict[str, AgentSession] = {}  # by key
        self._starting = asyncio.Lock()

    async def close(self) -> None:
        """Close the endpoint."""
        await self._server.close()

    def _find_caller(self, header: str | None) -> Caller | None:
        session = self._sessions.get(api_keys.bearer(header) or "")
        if session is None:
            return None
        return Caller(session.name, session)

    async def play(
        self, task: EpisodeTask, context: SessionContext, on_tokens: Callable[[int], None]
    ) -> EpisodeResult:
        """Play one episode; when cancelled, kill the program.

        Raises:
            EpisodeFailed: if the program does not start, crashes, gives no result, or never calls
                the policy.
        """
        # a hub's first episodes begin at the same time
        async with self._starting:
            if not self._server.address:
                await self._server.start("127.0.0.1", 0)
        session = AgentSession(task, context, on_tokens)
        key = f"rl-{secrets.token_urlsafe(24)}"
        started_at = time.perf_counter()
        self._sessions[key] = session
        args = task.domain.args
        try:
            if isinstance(args, AgentArgs):
                outcome = await self._run_program(task, args, session, self._endpoint(task, key))
            else:
                variables = self._endpoint(task, key)
                outcome = await play_task(task, session, self._server.address, variables)
        except (OSError, UserError) as error:
            raise EpisodeFailed("env", f"the agent cannot be started: {error}") from None
        finally:
            # a process that outlives its program gets no more answers
            session.close()
            del self._sessions[key]
        env_step_s = max(0.0, time.perf_counter() - started_at - session.generate_s)
        episode = _make_result(task, session, outcome, env_step_s=env_step_s)
        if outcome.row is not None and task.domain.sends_messages:
            episode.row = fitting_columns(outcome.row)
        return episode

    async def _run_program(
        self,
        task: EpisodeTask,
        args: AgentArgs,
        session: AgentSession,
        endpoint: Mapping[str, str],
    ) -> ProgramOutcome:
        """Run the user's program on the hub's host and return its own result."""
        row = agent_env.row(args, task.task_index, task.split)
        env = {
            **worker_environment(self._passed),
            **agent_env.whole_env(args),
            **endpoint,
            # hundreds of agents share a machine: a thread pool each would starve all of them
            "OMP_NUM_THREADS": "1",
        }
        with sandboxed_start(task.domain, args.cwd) as sandbox:
            command = sandboxed_command(sandbox, agent_env.command(args))
            program_exit = await program.run(
                command,
                self._task_line(task, row),
                env,
                args.cwd,
                sandbox.files if sandbox else (),
            )
        return ProgramOutcome(
            _read_result(args, session, program_exit),
            agent_env.text_of(args, row, args.prompt),
            agent_env.text_of(args, row, args.answer),
            row,
        )

    def _task_line(self, task: EpisodeTask, row: object) -> str:
        fields: dict[str, object] = {
            "task_index": task.task_index,
            "split": task.split,
            "seed": task.seed,
            "episode": task.episode,
        }
        if row is not None:
            fields["row"] = row
        return json.dumps(fields, ensure_ascii=False) + "\n"

    def _endpoint(self, task: EpisodeTask, key: str) -> dict[str, str]:
        """Return the variables that tell a program where the policy is."""
        return {
            "OPENAI_BASE_URL": self._server.address,
            "OPENAI_API_KEY": key,
            "OPENAI_MODEL": task.policy,
            # whose clients add /v1 themselves
            "ANTHROPIC_BASE_URL": self._server.address.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": key,
            "ANTHROPIC_MODEL": task.policy,
        }


def _read_result(
    args: AgentArgs, session: AgentSession, program_exit: program.ProgramExit
) -> AgentResult:
    """Return the program's result.

    A program that gives up for lack of calls, context or answer length did not crash.

    Raises:
        EpisodeFailed: if the program crashed or never called the policy.
    """
    try:
        result = read(
            args.reward,
            program_exit.status,
            program_exit.stdout,
            program_exit.stderr,
            is_cut=program_exit.is_cut,
        )
    except BadResult as error:
        if session.failure:
            raise EpisodeFailed("generate", f"{error} ({session.failure})") from None
        if session.refusal is None and session.is_cut:
            session.refusal = "length"
        if session.refusal is None:
            raise EpisodeFailed("env", str(error), error.trace) from None
        result = AgentResult(None if args.reward == "none" else 0.0)
    if not session.record.samples:
        if session.failure:
            raise EpisodeFailed("generate", session.failure)
        if session.refusal == "length":
            limit = session.served_model.max_context_tokens
            raise EpisodeFailed(
                "fatal", f"the agent's first prompt exceeds max_context_tokens, which is {limit}"
            )
        raise EpisodeFailed("env", "the agent ended without a call to the policy")
    return result


def _make_result(
    task: EpisodeTask,
    session: AgentSession,
    outcome: ProgramOutcome,
    env_step_s: float,
) -> EpisodeResult:
    result = outcome.result
    samples = session.record.samples
    reward = result.reward or 0.0
    last_sample = samples[-1]
    last_sample.turns[-1] = msgspec.structs.replace(last_sample.turns[-1], reward=reward)
    metrics = {
        **result.metrics,
        "num_turns": float(session.record.num_calls),
        "num_samples": float(len(samples)),
    }
    sampled = sum(turn.end - turn.start for sample in samples for turn in sample.turns)
    if (untrained := sampled - sum(sample.loss_mask.count(1) for sample in samples)) > 0:
        metrics["reshaped_share"] = untrained / sampled
    trajectories = []
    num_turns = 0
    for sample in samples:
        trajectory = _make_trajectory(task, session, sample, result, reward)
        messages = session.messages_of(sample, num_turns)
        trajectories.append(msgspec.structs.replace(trajectory, messages=messages))
        num_turns += len(sample.turns)
    response = result.response
    if response is None:
        response = session.record.last_response
    trajectories[-1] = msgspec.structs.replace(trajectories[-1], response=response, metrics=metrics)
    return EpisodeResult(
        trajectories,
        outcome.prompt,
        outcome.reference,
        generate_s=session.generate_s,
        env_step_s=env_step_s,
        frames=[],
    )


def _make_trajectory(
    task: EpisodeTask,
    session: AgentSession,
    sample: RecordedSample,
    result: AgentResult,
    reward: float,
) -> wire.Trajectory:
    return wire.Trajectory(
        episode=task.episode,
        token_ids=wire.column(sample.token_ids, "<i4"),
        loss_mask=wire.column(sample.loss_mask, "|u1"),
        logprobs=wire.column(sample.logprobs, "<f4"),
        version_runs=wire.column(sample.version_runs, "<i4"),
        turns=sample.turns,
        reward=reward,
        reward_parts={} if result.reward is None else {"env": reward},
        success=result.success,
        end=session.refusal or "terminated",
        greedy=task.greedy,
    )
