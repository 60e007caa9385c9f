"""The record of a seat whose player exchanges text: evaluations count it, nothing trains on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from broker.contract import wire
from envhub.envs.base import Environment, StepResult
from envhub.task import EpisodeResult, EpisodeTask
from rlearner_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class _TextTurn:
    observed: str
    reply: str
    step: StepResult


class TextRecord:
    """The turns of one seat of one episode."""

    def __init__(self, task: EpisodeTask, policy: str, seat: str) -> None:
        self._task = task
        self._policy = policy
        self._seat = seat
        self._turns: list[_TextTurn] = []

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, observed: str, reply: str, step: StepResult) -> None:
        """Add what the seat saw, what it said, and what followed."""
        self._turns.append(_TextTurn(observed, reply, step))

    def result(
        self, tokenizer: Tokenizer, environment: Environment, *, is_over: bool
    ) -> EpisodeResult:
        """Return the episode as this seat saw it; none of its tokens was sampled by the policy.

        Args:
            tokenizer: of the trained policy, for a record that it can show.
            is_over: whether the environment ended it.
        """
        last = self._turns[-1]
        text = "\n".join(part for turn in self._turns for part in (turn.observed, turn.reply))
        token_ids = tokenizer.encode(text)[: self._task.domain.section.max_context_tokens] or [0]
        num_tokens = len(token_ids)
        reward = math.fsum(turn.step.reward for turn in self._turns)
        has_reward = self._task.domain.environment.has_reward
        valid_rate = sum(turn.step.valid for turn in self._turns) / len(self._turns)
        is_whole = is_over and not last.step.truncated
        trajectory = wire.Trajectory(
            episode=self._task.episode,
            token_ids=wire.column(token_ids, "<i4"),
            loss_mask=wire.column(bytearray(num_tokens), "|u1"),
            logprobs=wire.Column("<f4", bytes(4 * num_tokens)),
            version_runs=wire.column([], "<i4"),
            turns=[self._turn(turn, num_tokens) for turn in self._turns],
            reward=reward,
            reward_parts={"env": reward} if has_reward else {},
            success=last.step.success,
            end="terminated" if is_whole else "truncated",
            response=last.reply,
            metrics={
                **last.step.metrics,
                "valid_action_rate": valid_rate,
                "num_turns": float(len(self._turns)),
            },
            seat=self._seat,
        )
        return EpisodeResult(
            [trajectory],
            environment.prompt,
            environment.reference,
            generate_s=0.0,
            env_step_s=0.0,
            frames=[],
        )

    def _turn(self, turn: _TextTurn, num_tokens: int) -> wire.Turn:
        # without tokens of its own: how the player makes them is not known
        return wire.Turn(
            start=num_tokens,
            end=num_tokens,
            reward=turn.step.reward,
            valid=turn.step.valid,
            finish_reason="stop",
            server=self._policy,
            anchor=turn.observed,
        )
