"""Any registered GEM environment by ``gem.make`` (Liu et al. 2025, arXiv:2510.01051).

The task is the seed of ``reset``. A won game ends with reward 1; GEM sets the penalty for text that
is not a move. gem-llm 0.1 (https://github.com/axon-rl/gem) pins msgspec 0.19 for its search tool,
but this project needs a newer one: install it without dependencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import Field

from broker.errors import ConfigError
from broker.settings.config import Section
from envhub.envs.adapters.foreign import library, one_line, seed_of
from envhub.envs.base import Environment, Observation, Split, StepResult

INSTALL: Final = (
    "pip install 'rlearner[gem]', then pip install --no-deps gem-llm==0.1.0 "
    "(it pins another msgspec)"
)


class GemArgs(Section):
    """``env_args`` of ``gem``."""

    id: str  # as gem.make takes it, for example game:GuessTheNumber-v0-easy
    make_args: dict[str, Any] = Field(default={})  # passed on to gem.make
    suffix: bool = True  # add the line that comes with an observation and asks for the next action
    success_reward: float = 1.0  # an episode whose last step has at least this reward is a success


class GemEnv(Environment):
    """One GEM environment, made once and reset for each episode."""

    Args = GemArgs

    args: GemArgs

    def __init__(self, args: GemArgs) -> None:
        super().__init__(args)
        self._env = _make_env(args)
        self._shown = ""

    @classmethod
    def check(cls, args: GemArgs) -> None:
        _make_env(args)

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        _import_gem()
        return {"id": "game:GuessTheNumber-v0-random"}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        observation, info = self._env.reset(seed=seed_of(task_index, split, seed))
        return self._show(observation, info)

    def step(self, text: str) -> StepResult:
        observation, reward, terminated, truncated, info = self._env.step(text)
        is_done = bool(terminated or truncated)
        is_solved = is_done and float(reward) >= self.args.success_reward
        return StepResult(
            self._show(observation, info),
            float(reward),
            is_done,
            success=is_solved,
            truncated=bool(truncated),
        )

    def text_frame(self) -> str:
        return self._shown

    def _show(self, observation: Any, info: dict[str, Any]) -> Observation:
        self._shown = observation
        suffix = str(info.get("suffix") or "")
        if self.args.suffix and suffix and isinstance(observation, str):
            self._shown = f"{observation}\n{suffix}"
        return Observation(self._shown)


def _import_gem() -> Any:
    # which registers GEM's own
    library("gem", "gem.envs", INSTALL)
    return library("gem", "gem", INSTALL)


def _make_env(args: GemArgs) -> Any:
    try:
        return _import_gem().make(args.id, **args.make_args)
    except (ImportError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            "id", args.id, f"an environment that gem.make makes: {one_line(error)}"
        ) from None
