"""Names Python functions as rewards of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from broker.errors import ConfigError
from rewardhub.rewards.base import Score
from rewardhub.rewards.caller import POOL, PREFIX
from rewardhub.rewards.function_forms import adapt_function

# A function, the name of a reward as in a configuration, or such an entry itself.
Reward = Callable[..., Any] | str | Mapping[str, Any]


class RewardFunctions:
    """Rewards that a program gives to a run.

    Args:
        rewards: one or several.

    Attributes:
        entries: of ``domains.NAME.rewards``.
        functions: those that are functions, by name.

    Raises:
        ConfigError: if one is neither a function nor a reward of a configuration.
    """

    def __init__(self, rewards: Reward | Iterable[Reward]) -> None:
        self.entries: list[dict[str, Any]] = []
        self.functions: dict[str, Score] = {}
        is_single = callable(rewards) or isinstance(rewards, (str, Mapping))
        for reward in [rewards] if is_single else rewards:  # type: ignore[union-attr]
            if callable(reward):
                name = self._unused_name(reward)
                self.functions[name] = adapt_function(reward, {}, "reward_funcs")
                self.entries.append({"name": f"{PREFIX}{name}", "pool": POOL})
            elif isinstance(reward, str):
                self.entries.append({"name": reward})
            elif isinstance(reward, Mapping):
                self.entries.append(dict(reward))
            else:
                allowed = "a function, the name of a reward, or an entry of domains.NAME.rewards"
                raise ConfigError("reward_funcs", reward, allowed)

    def missing_in(self, domain: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the entries that a domain of a configuration does not have yet."""
        names = [reward["name"] for reward in domain.get("rewards") or []]
        return [entry for entry in self.entries if entry["name"] not in names]

    def _unused_name(self, function: Callable[..., Any]) -> str:
        name = getattr(function, "__name__", type(function).__name__)
        name = name if name.isidentifier() and not name.startswith("_") else "reward"
        numbers = range(2, len(self.functions) + 3)
        names = [name, *(f"{name}_{number}" for number in numbers)]
        return next(name for name in names if name not in self.functions)
