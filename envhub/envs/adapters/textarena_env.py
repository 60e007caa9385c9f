"""TextArena's games by ``textarena.make`` (Guertler et al. 2025, arXiv:2504.11442).

The model plays one seat. In games of several players your function ``opponent``, (observation,
random generator) to text, plays the others; without it each player is a seat of the episode,
``player_0`` and so on. The reward is what the game
(https://github.com/LeonGuertler/TextArena) gives the seat at its end. The model sees what is new
since its last turn: the library's wrappers repeat the whole game, which the conversation already
contains. The task is the seed of ``reset``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, PositiveInt

from broker.errors import ConfigError
from broker.settings.config import Section
from broker.settings.registry import resolve
from envhub.envs.adapters.foreign import library, one_line, seed_of
from envhub.envs.base import Environment, Observation, Split, StepResult

INSTALL: Final = "pip install 'rlearner[textarena]'"


class TextArenaArgs(Section):
    """``env_args`` of ``textarena``."""

    harmless = ("id", "num_players", "seat", "success_reward")

    id: str  # as textarena.make takes it, for example GuessTheNumber-v0
    make_args: dict[str, Any] = Field(default={})  # passed on to textarena.make
    num_players: PositiveInt = 1
    seat: Annotated[int, Field(ge=0)] = 0  # with opponent: which player the model is
    # dotted path or file path to a function of (observation, random.Random) for the other players;
    # empty with several: domains.X.seats says who plays
    opponent: str = ""
    success_reward: float = 1.0  # a game that ends with at least this reward is a success


class TextArenaEnv(Environment):
    """One game at a time."""

    Args = TextArenaArgs

    args: TextArenaArgs

    def __init__(self, args: TextArenaArgs) -> None:
        super().__init__(args)
        opponent = resolve("opponent", args.opponent, {}) if args.opponent else None
        self._opponent: Callable[[str, random.Random], str] | None = opponent
        self._env: Any = None
        self._rng = random.Random()
        self._before: dict[int, str] = {}  # what each player has seen
        self._shown = ""
        self._has_seats = bool(self.seats(args))

    @classmethod
    def seats(cls, args: TextArenaArgs) -> tuple[str, ...]:
        if args.num_players == 1 or args.opponent:
            return ()
        return tuple(f"player_{number}" for number in range(args.num_players))

    @classmethod
    def check(cls, args: TextArenaArgs) -> None:
        if args.seat >= args.num_players:
            raise ConfigError("seat", args.seat, f"below num_players, which is {args.num_players}")
        cls(args)
        _make_env(args)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        library("textarena", "textarena", INSTALL)
        return {"id": "FifteenPuzzle-v0"}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        number = seed_of(task_index, split, seed)
        self._rng.seed(number)
        self._env = _make_env(self.args)
        self._env.reset(num_players=self.args.num_players, seed=number)
        self._before = {}
        if not self._has_seats and self._others():
            raise ValueError("the game ended before the model's first turn")
        return self._observe()

    def step(self, text: str) -> StepResult:
        if self._has_seats:
            return self._step_seat(text)
        is_done, _ = self._env.step(action=text)
        # this player's texts in a row that were not a move
        is_valid = not getattr(self._env.state, "error_count", 0)
        is_done = bool(is_done) or self._others()
        if not is_done:
            role = self._env.state.role_mapping.get(self.args.seat, f"Player {self.args.seat}")
            return StepResult(self._observe(f"[{role}] {text}"), 0.0, False, is_valid)
        rewards, infos = self._env.close()
        own_info = (infos or {}).get(self.args.seat, {})
        reward = float((rewards or {}).get(self.args.seat, 0.0))
        self._shown = str(own_info.get("reason", ""))
        is_valid = is_valid and not own_info.get("invalid_move", False)
        return StepResult(
            Observation(self._shown), reward, True, is_valid, reward >= self.args.success_reward
        )

    def text_frame(self) -> str:
        return self._shown

    def _step_seat(self, text: str) -> StepResult:
        """Act for the player whose turn it is."""
        player = self._env.state.current_player_id
        is_done, _ = self._env.step(action=text)
        is_valid = not getattr(self._env.state, "error_count", 0)
        if not is_done:
            role = self._env.state.role_mapping.get(player, f"Player {player}")
            return StepResult(self._observe(f"[{role}] {text}"), 0.0, False, is_valid)
        rewards, infos = self._env.close()
        own_info = (infos or {}).get(player, {})
        self._shown = str(own_info.get("reason", ""))
        seat_rewards = {
            seat: float((rewards or {}).get(number, 0.0))
            for number, seat in enumerate(self.seats(self.args))
        }
        return StepResult(
            Observation(self._shown),
            0.0,
            True,
            is_valid and not own_info.get("invalid_move", False),
            seat_rewards=seat_rewards,
            seat_successes=tuple(
                seat for seat, reward in seat_rewards.items() if reward >= self.args.success_reward
            ),
        )

    def _others(self) -> bool:
        """Let the others play until it is the model's turn. Return whether the game is over."""
        while self._env.state.current_player_id != self.args.seat:
            player, view = self._env.get_observation()
            if self._opponent is None:
                raise ValueError(f"it is the turn of player {player}, and there is no opponent")
            is_done, _ = self._env.step(action=self._opponent(_view_text(view, player), self._rng))
            if is_done:
                return True
        return False

    def _observe(self, own_text: str = "") -> Observation:
        """Return what is new to the player whose turn it is, without the model's own words."""
        player, view = self._env.get_observation()
        before = self._before.get(player, "")
        whole = _view_text(view, player)
        is_repeated = isinstance(view, str) and whole.startswith(before)
        news = whole[len(before) :] if is_repeated else whole
        self._shown = news.lstrip("\n").removeprefix(own_text).lstrip("\n")
        self._before[player] = whole if isinstance(view, str) else ""
        return Observation(self._shown, seat=f"player_{player}" if self._has_seats else "")


def _view_text(view: Any, seat: int) -> str:
    """Return what a player sees as text.

    A raw game gives a list of (from, text, kind), which includes the player's own texts.
    """
    if isinstance(view, str):
        return view
    return "\n".join(str(message[1]) for message in view or [] if message[0] != seat)


def _make_env(args: TextArenaArgs) -> Any:
    try:
        return library("textarena", "textarena", INSTALL).make(args.id, **args.make_args)
    except (ImportError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            "id", args.id, f"a game that textarena.make makes: {one_line(error)}"
        ) from None
