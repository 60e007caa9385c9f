"""Plays an episode whose seats have players of their own.

Each seat of a model on rollout servers is an ``Episode``, to which the turns of all others are part
of the environment. The samples are those of the seats that the trained policy plays, one for each,
or one for each of their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import msgspec

from broker.contract import wire
from envhub.envs.base import Environment
from envhub.episodes.episode import Episode, EpisodeContext
from envhub.episodes.seats.policies import PlayedPolicies, PlayerServices
from envhub.episodes.seats.table import SeatTable
from envhub.episodes.seats.text_players import TextPlayer
from envhub.episodes.seats.text_record import TextRecord
from envhub.episodes.seats.view import SeatCalls, SeatSpans, SeatUnused, SeatView
from envhub.lengths.predictor import LengthPredictor
from envhub.players.base import PlayerView
from envhub.servers.turn import TurnFailed, mix
from envhub.task import EpisodeFailed, EpisodeResult, EpisodeTask


@dataclass(frozen=True)
class SeatPlan:
    """Who plays the seats of an episode.

    Attributes:
        players: policy of each seat, in the order of the environment.
        measured: seats whose part is recorded: those of the trained policy, else the first one's.
    """

    players: Mapping[str, str]
    measured: tuple[str, ...]

    @classmethod
    def of(cls, task: EpisodeTask) -> SeatPlan:
        """Return the plan of a task; the same for all episodes of its group."""
        domain = task.domain
        if not domain.seats:
            return cls({"": domain.section.policy}, ("",))
        players = domain.seat_players(task.task_index, task.seed)
        own_seats = tuple(seat for seat, policy in players.items() if policy == wire.ACTOR)
        return cls(players, own_seats or (domain.first_seat(task.task_index),))


class SeatedEpisode:
    """One episode with several players.

    Args:
        context: for the seats of models that are served.
        predictor: returns what predicts the lengths of a policy's turns.
        on_tokens: see ``envhub.episodes.runners.EpisodeRunners.play``.
    """

    def __init__(
        self,
        task: EpisodeTask,
        environment: Environment,
        context: EpisodeContext,
        *,
        policies: PlayedPolicies,
        services: PlayerServices,
        predictor: Callable[[str], LengthPredictor],
        on_tokens: Callable[[int], None],
    ) -> None:
        self._task = task
        self._context = context
        self._policies = policies
        self._services = services
        self._predictor = predictor
        self._on_tokens = on_tokens
        self._plan = SeatPlan.of(task)
        self._table = SeatTable(
            environment, services.calls, list(self._plan.players), context.spans
        )

    async def run(self) -> EpisodeResult:
        """Play the episode.

        Raises:
            EpisodeFailed: if a player fails, in which case its policy and seat are named, or no
                measured seat had a turn.
        """
        await self._table.begin(self._task)
        try:
            async with asyncio.TaskGroup() as group:
                seats = {
                    seat: group.create_task(self._play_seat(seat, policy))
                    for seat, policy in self._plan.players.items()
                }
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        results = {
            seat: result
            for seat in self._plan.measured
            if (result := seats[seat].result()) is not None
        }
        if not results:
            names = ", ".join(self._plan.measured)
            raise EpisodeFailed("fatal", f"the episode was over before seat {names} had a turn")
        return self._combine(results)

    async def _play_seat(self, seat: str, policy: str) -> EpisodeResult | None:
        """Play one seat; None if it never had a turn."""
        temperature = self._task.domain.section.sampling.temperature
        if self._task.temperature is not None:
            temperature = self._task.temperature
        player = self._policies.text_player(policy, seat, self._services, temperature)
        try:
            if player is not None:
                return await self._play_text(seat, policy, player)
            return await self._play_served(seat, policy)
        except SeatUnused:
            return None
        except TurnFailed as error:
            if policy == wire.ACTOR:
                raise
            raise EpisodeFailed("generate", f"{self._name(seat, policy)}: {error}") from error
        except EpisodeFailed as error:
            if policy == wire.ACTOR:
                raise
            detail = f"{self._name(seat, policy)}: {error.detail}"
            raise EpisodeFailed(error.kind, detail, error.trace) from error
        finally:
            self._table.stop()

    async def _play_served(self, seat: str, policy: str) -> EpisodeResult:
        is_subject = policy == wire.ACTOR
        number = list(self._plan.players).index(seat)
        task = replace(
            self._task,
            domain=self._task.domain.for_seat(seat),
            seat=seat,
            seat_number=number + 1 if seat else 0,
        )
        tokenizer = self._context.tokenizer
        if not is_subject:
            temperature = self._policies.temperature_of(policy)
            task = replace(
                task,
                policy=policy,
                min_version=0,
                greedy=False,
                temperature=task.temperature if temperature is None else temperature,
            )
            tokenizer = self._policies.tokenizer_of(policy)
        if seat != self._plan.measured[0]:
            task = replace(task, record=False)
        context = replace(
            self._context,
            tokenizer=tokenizer,
            calls=SeatCalls(),
            lengths=self._predictor(task.policy),
            spans=SeatSpans(self._context.spans),
        )
        view = SeatView(self._table, seat)
        on_tokens = self._on_tokens
        if not is_subject:
            view = SeatView(self._table, seat, partial(self._check_words, seat))
            # versions of other policies say nothing about the age of what is trained on
            on_tokens = _ignore_version
        return await Episode(task, view, context, on_tokens).run()

    async def _play_text(self, seat: str, policy: str, player: TextPlayer) -> EpisodeResult | None:
        seed = mix(*self._task.sampling_seeds, list(self._plan.players).index(seat))
        record = TextRecord(self._task, policy, seat)
        is_healthy = False
        try:
            await player.begin(seed)
            turn = await self._table.wait_turn(seat)
            while not turn.done and len(record) < self._task.domain.section.max_turns:
                view = turn.observation
                reply = await player.answer(PlayerView(view.text, view.actions))
                self._check_words(seat, reply)
                turn = await self._table.act(seat, "step", reply)
                if player.must_be_legal and not turn.valid:
                    raise EpisodeFailed("env", f"it made an illegal move: {reply[:80]!r}")
                record.add(view.text, reply, turn)
            is_healthy = True
        finally:
            await player.close(is_healthy=is_healthy)
        if not len(record):
            return None
        return record.result(self._context.tokenizer, self._table.environment, is_over=turn.done)

    def _combine(self, results: Mapping[str, EpisodeResult]) -> EpisodeResult:
        """Return one result with the trajectories of all measured seats."""
        measured = self._plan.measured
        trajectories = []
        for number, seat in enumerate(measured):
            if seat not in results:
                continue
            for trajectory in results[seat].trajectories:
                if self._plan.players[seat] != wire.ACTOR:
                    trajectory = without_mask(trajectory)
                episode = self._task.episode * len(measured) + number
                trajectories.append(msgspec.structs.replace(trajectory, episode=episode, seat=seat))
        first = next(iter(results.values()))
        return replace(
            first,
            trajectories=trajectories,
            generate_s=sum(result.generate_s for result in results.values()),
            env_step_s=self._table.env_step_s,
            prompts=list(chain.from_iterable(result.prompts for result in results.values())),
            num_seats=len(measured),
        )

    def _check_words(self, seat: str, words: str) -> None:
        """Refuse the words of an untrained seat that also speaks for others, as some simulators do.

        Raises:
            EpisodeFailed: if a line begins like one of another seat.
        """
        others = [name.lower() for name in self._plan.players if name != seat]
        for line in words.splitlines():
            speaker, colon, _ = line.partition(":")
            if colon and speaker.strip().lower() in others:
                problem = f"it spoke out of turn: {line.strip()[:80]!r} is a line of another seat"
                raise EpisodeFailed("env", problem)

    def _name(self, seat: str, policy: str) -> str:
        return f"policy {policy}, seat {seat}" if seat else f"policy {policy}"


def without_mask(trajectory: wire.Trajectory) -> wire.Trajectory:
    """Return a trajectory none of whose tokens is the trained policy's."""
    num_tokens = len(trajectory.loss_mask.data)
    return msgspec.structs.replace(
        trajectory,
        loss_mask=wire.column(bytearray(num_tokens), "|u1"),
        logprobs=wire.Column("<f4", bytes(4 * num_tokens)),
        version_runs=wire.column([], "<i4"),
    )


def _ignore_version(_: int) -> None:
    pass


def is_seated(task: EpisodeTask) -> bool:
    """Return whether an episode has other players than the policy of its ticket."""
    return bool(task.domain.seats) or task.domain.section.policy != wire.ACTOR
