"""Any gymnasium environment with discrete actions or texts (https://gymnasium.farama.org/api/env).

The model reads what your function ``observe`` makes of (observation, the gymnasium environment).
Without it, texts are shown as they are, numbers and arrays with four digits. The task is the seed
of ``reset``; an environment whose start does not depend on a seed has a single task, the same in
training and evaluation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, NonNegativeFloat

from broker.errors import ConfigError
from broker.settings.config import PluginMark, Section
from broker.settings.registry import resolve
from envhub.envs.adapters.foreign import library, one_line, seed_of
from envhub.envs.base import Environment, Observation, Split, StepResult
from envhub.envs.text.answers import one_of, tagged


class GymnasiumArgs(Section):
    """``env_args`` of ``gymnasium``."""

    harmless = ("actions", "anchors", "success_return", "answer_tag", "format_penalty")

    # as gymnasium.make takes it; ``module:Name-v0`` imports the module that registers it first
    id: Annotated[str, PluginMark("gymnasium")]
    make_args: dict[str, Any] = Field(default={})  # passed on to gymnasium.make
    # dotted path or file path to a function of (observation, environment) that returns text
    observe: str = ""
    # names of the discrete actions in their order; none: their numbers
    actions: list[str] = Field(default=[])
    anchors: bool = False  # observations distinguish all states: compare steps by them (gigpo)
    # an episode with at least this reward is a success; None: info's is_success
    success_return: float | None = None
    # read the action from the last <answer>…</answer> instead of the whole text
    answer_tag: bool = False
    # minus the reward of text that is not an action and is not sent on
    format_penalty: NonNegativeFloat = 0.0


class GymnasiumEnv(Environment):
    """One gymnasium environment, made once and reset for each episode."""

    Args = GymnasiumArgs

    args: GymnasiumArgs

    def __init__(self, args: GymnasiumArgs) -> None:
        super().__init__(args)
        self._env = _make_env(args)
        self._observe = resolve("observe", args.observe, {}) if args.observe else plain
        self._actions = _action_numbers(args, self._env.action_space)
        self._return = 0.0
        self._shown = ""

    @classmethod
    def check(cls, args: GymnasiumArgs) -> None:
        cls(args).close()

    @classmethod
    def example(cls, folder: Path) -> dict[str, Any]:
        return {"id": "CartPole-v1", "actions": ["left", "right"]}

    def reset(self, task_index: int, split: Split, seed: int) -> Observation:
        observation, _ = self._env.reset(seed=seed_of(task_index, split, seed))
        self._return = 0.0
        return self._show(observation)

    def step(self, text: str) -> StepResult:
        if self._actions is None:
            action: Any = tagged(text, self.args.answer_tag)
            is_valid = self._env.action_space.contains(action)
        else:
            number = one_of(text, self._actions, self.args.answer_tag)
            is_valid = number is not None
            action = number and int(number)
        if not is_valid:
            return StepResult(self._seen(), -self.args.format_penalty, False, valid=False)
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._return += float(reward)
        is_done = bool(terminated or truncated)
        is_truncated = bool(truncated and not terminated)
        return StepResult(
            self._show(observation),
            float(reward),
            is_done,
            success=is_done and self._has_succeeded(info),
            truncated=is_truncated,
        )

    def text_frame(self) -> str:
        return self._shown

    def close(self) -> None:
        self._env.close()

    def _has_succeeded(self, info: dict[str, Any]) -> bool:
        if self.args.success_return is not None:
            return self._return >= self.args.success_return
        return bool(info.get("is_success", False))

    def _show(self, observation: Any) -> Observation:
        self._shown = self._observe(observation, self._env)
        return self._seen()

    def _seen(self) -> Observation:
        return Observation(self._shown, self._shown if self.args.anchors else "")


def plain(observation: Any, environment: Any) -> str:
    """Return a text as it is, numbers with four digits, other values with one part per line."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return "\n".join(
            f"{name}: {plain(part, environment)}" for name, part in observation.items()
        )
    if isinstance(observation, tuple):
        return "\n".join(plain(part, environment) for part in observation)
    array = np.atleast_1d(np.asarray(observation))
    rows = array.reshape(-1, array.shape[-1])
    return "\n".join(" ".join(f"{number:.4g}" for number in row) for row in rows)


def _make_env(args: GymnasiumArgs) -> Any:
    gymnasium = library("gymnasium", "gymnasium", "pip install gymnasium")
    try:
        return gymnasium.make(args.id, **{"disable_env_checker": True, **args.make_args})
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise ConfigError(
            "id", args.id, f"an environment that gymnasium.make makes: {one_line(error)}"
        ) from None


def _action_numbers(args: GymnasiumArgs, space: Any) -> dict[str, str] | None:
    """Return the number of each action by its name in capitals; None if actions are texts.

    Raises:
        ConfigError: if actions are neither discrete nor texts, or the names do not match their
            number.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return None
    if not isinstance(space, spaces.Discrete):
        raise ConfigError(
            "id", args.id, f"an environment whose actions are Discrete or Text, not {space}"
        )
    names = [name.strip().upper() for name in args.actions] or [
        str(space.start + number) for number in range(space.n)
    ]
    if len(set(names)) != space.n:
        raise ConfigError(
            "actions", args.actions, f"{space.n} different names, one for each action of {args.id}"
        )
    return {name: str(space.start + number) for number, name in enumerate(names)}
