"""Episodes of agents in this process: the real endpoint, and a policy that answers by a script."""

from __future__ import annotations

from typing import Any

from envhub_kit import Scripted, domain

from envhub.episodes.runners import EpisodeLimits, EpisodeRunners
from envhub.servers.turn import SampledTurn, TurnRequest
from envhub.task import EpisodeResult, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from rlearner_text.tokenizer import Tokenizer


class Policy(Scripted):
    """Answers by a script; every call has a version and a logprob of its own.

    Attributes:
        sampled: tokens of each answer.
    """

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.sampled: list[list[int]] = []

    async def turn(self, ask: TurnRequest) -> SampledTurn:
        sampled = await super().turn(ask)
        self.sampled.append(list(sampled.token_ids))
        number = len(self.asks)
        count, reason = len(sampled.token_ids), sampled.finish_reason if not self.close else "stop"
        return SampledTurn.of(
            sampled.token_ids, [-number / 8] * count, [number, count], reason, f"s{number}"
        )


def agent_runners(tokenizer: Tokenizer, policy: Any, timeout_s: float = 30.0) -> EpisodeRunners:
    limits = EpisodeLimits(timeout_s, 10.0)
    return EpisodeRunners(tokenizer, policy, EnvironmentCalls(5.0), limits)


def agent_task(args: dict[str, Any], **fields: Any) -> EpisodeTask:
    """A task of ``env: agent``; ``fields`` are those of the domain."""
    section = {
        "context": "steps",
        "max_turns": 8,
        "max_context_tokens": 400,
        "sampling": {"max_tokens": 12},
        **fields,
    }
    of = domain("agent", env_args=args, **section)
    of.check()
    return EpisodeTask(
        id="hub.1", domain=of, task_index=3, split="eval", seed=11, episode=2, min_version=1
    )


async def play_agent(
    tokenizer: Tokenizer,
    policy: Any,
    args: dict[str, Any],
    *,
    timeout_s: float = 30.0,
    **fields: Any,
) -> EpisodeResult:
    """Play one episode, with room for long answers and prompts."""
    section = {"max_context_tokens": 2000, "sampling": {"max_tokens": 300}, **fields}
    runners = agent_runners(tokenizer, policy, timeout_s)
    try:
        return await runners.play(agent_task(args, **section), lambda _: None)
    finally:
        await runners.close()


def sampled_spans(episode: EpisodeResult) -> list[list[list[int]]]:
    """The tokens of each turn of each sample."""
    return [
        [sample.token_ids.array()[turn.start : turn.end].tolist() for turn in sample.turns]
        for sample in episode.trajectories
    ]
