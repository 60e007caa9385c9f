"""Plays a trial episode of each domain with the user's code, for ``rlearner check``.

It needs no model: every turn sends the same text, which an environment must answer
(``valid=False`` at worst).
"""

from __future__ import annotations

from typing import Any, Final

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from envhub.domain import Domain, load_domains
from envhub.envs.agent import AgentEnvironment
from envhub.envs.base import WORKER, Environment, StepResult
from envhub.episodes.conversation_log import ConversationLog
from envhub.workers.calls import CallFailed, EnvironmentCalls
from envhub.workers.returned import ReturnedValueError, observation, step_result
from envhub.workers.returned import row as returned_row
from envhub.workers.worker_pool import NoWorker, RemoteEnvironment, WorkerPools

TRIAL_TEXT: Final = "trial"
MAX_TURNS: Final = 8
SEED: Final = 0


async def try_domains(settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Play training task 0 of every domain with the user's environment or reward, except agents.

    Returns:
        By domain the fields of the ``rewardhub.rewards.base.Sample`` that the episode makes.

    Raises:
        UserError: if an environment fails; says how, with the user's file and line.
    """
    envhub = settings.envhub
    calls = EnvironmentCalls(envhub.step_timeout_s)
    worker_pools = WorkerPools(envhub.worker_memory_mib, envhub.pass_env)
    samples: dict[str, dict[str, Any]] = {}
    try:
        for name, domain in load_domains(settings).items():
            if _has_own_code(domain) and not issubclass(domain.environment, AgentEnvironment):
                samples[name] = await _try_domain(domain, calls, worker_pools)
    finally:
        calls.close()
        await worker_pools.close()
    return samples


def _has_own_code(domain: Domain) -> bool:
    return any(
        ":" in name
        for name in (domain.section.env, *(reward.name for reward in domain.section.rewards))
    )


async def _try_domain(
    domain: Domain, calls: EnvironmentCalls, worker_pools: WorkerPools
) -> dict[str, Any]:
    try:
        if domain.isolation not in WORKER:
            environment = await calls.make(domain.make, in_thread=domain.isolation == "thread")
        else:
            environment = await worker_pools.environment(domain)
        try:
            if isinstance(environment, RemoteEnvironment):
                await calls.call(environment, "constructor")
            return await _play_episode(domain, calls, environment)
        finally:
            await calls.call(environment, "close")
    except (CallFailed, ReturnedValueError, NoWorker) as error:
        raise UserError(
            f"domains.{domain.name}.env: {domain.section.env} failed in a trial episode: {error}"
        ) from None


async def _play_episode(
    domain: Domain, calls: EnvironmentCalls, environment: Environment
) -> dict[str, Any]:
    view = observation("reset", await calls.call(environment, "reset", 0, "train", SEED))
    log = ConversationLog(domain)
    log.open(view.text, view.history)
    row = returned_row("after reset, row", environment.row)
    turns: list[dict[str, Any]] = []
    step = StepResult(view, 0.0, done=False)
    for _ in range(min(domain.section.max_turns, MAX_TURNS)):
        if turns:
            log.add_observation("user", step.observation.text)
        step = step_result(await calls.call(environment, "step", TRIAL_TEXT), "step")
        message = len(log.messages)
        turns.append(
            {"message": message, "reward": step.reward, "valid": step.valid, "num_tokens": 1}
        )
        log.add_turn(TRIAL_TEXT, [])
        if step.done:
            break
    reward = sum(turn["reward"] for turn in turns)
    return {
        "domain": domain.name,
        "task_index": 0,
        "prompt": environment.prompt,
        "response": TRIAL_TEXT,
        "reference": environment.reference,
        "reward": reward,
        "reward_parts": {"env": reward} if domain.environment.has_reward else {},
        "success": step.success,
        "end": "terminated" if step.done and not step.truncated else "truncated",
        "num_turns": len(turns),
        "num_tokens": len(turns),
        "metrics": step.metrics,
        "row": row,
        "messages": [message.plain() for message in log.messages],
        "turns": turns,
        "max_turns": domain.section.max_turns,
    }
