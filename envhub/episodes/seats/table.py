"""Passes the turns of one environment between the seats of an episode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from envhub.envs.base import Environment, Observation, StepResult
from envhub.episodes.episode import WorkSpans
from envhub.task import EpisodeFailed, EpisodeTask
from envhub.workers.calls import EnvironmentCalls
from envhub.workers.returned import observation, step_result, text


class SeatTable:
    """The environment of an episode, and whose turn it is.

    A seat waits for its turn, acts, and waits again; it gets the rewards of all actions in between.
    Only the seat that the newest observation names can act.

    Args:
        seats: in the environment's order; an empty name alone in environments without seats.

    Attributes:
        env_step_s: seconds spent in the environment.
        is_over: whether no seat will get another turn.
    """

    def __init__(
        self,
        environment: Environment,
        calls: EnvironmentCalls,
        seats: Sequence[str],
        spans: WorkSpans,
    ) -> None:
        self.environment = environment
        self.env_step_s = 0.0
        self.is_over = False
        self._calls = calls
        self._spans = spans
        self._ticket = 0
        self._rewards = dict.fromkeys(seats, 0.0)  # since the seat's last turn
        self._valid = dict.fromkeys(seats, True)  # of its last action
        self._has_acted = dict.fromkeys(seats, False)
        self._turns: dict[str, asyncio.Queue[StepResult]] = {
            seat: asyncio.Queue() for seat in seats
        }

    async def begin(self, task: EpisodeTask) -> None:
        """Reset the environment and give the first turn.

        Raises:
            EpisodeFailed: if it gives the turn to no seat.
        """
        self._ticket = task.ticket
        result = await self._call("reset", task.task_index, task.split, task.seed)
        view = observation("reset", result)
        self._give_turn("reset", view)

    async def wait_turn(self, seat: str) -> StepResult:
        """Return what has happened to a seat since its last action, when it is its turn or the
        episode is over.
        """
        return await self._turns[seat].get()

    async def act(self, seat: str, method: str, argument: Any) -> StepResult:
        """Act for the seat whose turn it is, and wait as ``wait_turn``.

        Args:
            method: of the environment, ``step`` or ``use``.

        Raises:
            EpisodeFailed: if the environment names a seat that it does not have.
        """
        step = step_result(await self._call(method, argument), method)
        self._valid[seat] = step.valid
        self._has_acted[seat] = True
        for name, reward in ((seat, step.reward), *step.seat_rewards.items()):
            if name not in self._rewards:
                raise self._unknown_seat(f"{method} rewarded", name)
            self._rewards[name] += reward
        if step.done:
            self._end(seat, step)
        else:
            self._give_turn(method, step.observation)
        return await self.wait_turn(seat)

    async def look(self) -> str:
        """Return the state in characters."""
        return text("text_frame returned what", await self._call("text_frame"))

    def stop(self) -> None:
        """Cut the episode off for every seat that waits, as one of them plays no further."""
        if not self.is_over:
            self._end("", StepResult(Observation(""), 0.0, done=True, truncated=True))

    def _end(self, acting: str, step: StepResult) -> None:
        self.is_over = True
        for seat, inbox in self._turns.items():
            inbox.put_nowait(
                StepResult(
                    # only the acting seat sees how it ended, as it does alone
                    step.observation if seat == acting else Observation(""),
                    self._rewards[seat],
                    done=True,
                    valid=self._valid[seat],
                    success=seat in step.seat_successes or (seat == acting and step.success),
                    truncated=step.truncated,
                    metrics=step.metrics,
                )
            )

    def _give_turn(self, method: str, view: Observation) -> None:
        seat = view.seat
        if seat not in self._turns:
            raise self._unknown_seat(f"{method} gave the turn to", seat)
        reward = 0.0
        # before its first action there is no turn that a reward could belong to
        if self._has_acted[seat]:
            reward = self._rewards[seat]
            self._rewards[seat] = 0.0
        turn = StepResult(view, reward, done=False, valid=self._valid[seat])
        self._turns[seat].put_nowait(turn)

    def _unknown_seat(self, action: str, seat: str) -> EpisodeFailed:
        names = ", ".join(self._turns)
        return EpisodeFailed("env", f"{action} seat {seat!r}; the environment has {names}")

    async def _call(self, method: str, *args: Any) -> Any:
        """Call the environment as ``Episode`` does, and measure it."""
        began = time.perf_counter()
        span = self._spans.enter("env_step")
        piece = self._calls.curve.enter(began)
        is_done = False
        try:
            result = await self._calls.call(self.environment, method, *args)
            is_done = True
            return result
        finally:
            self._calls.curve.leave(piece, time.perf_counter(), is_done)
            self._spans.leave("env_step", span, self._ticket)
            self.env_step_s += time.perf_counter() - began
