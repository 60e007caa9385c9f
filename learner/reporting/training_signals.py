"""Warns from a run's metrics that it has nothing to learn from, or is breaking. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

# Steps in a row without the condition before a warning ends.
OVER_AFTER: Final = 3
# Lines that ``rlearner status`` reads.
RECENT: Final = 100
EQUAL: Final = 1e-9
FEW_TOKENS: Final = 8

# Metric name to value.
Line = Mapping[str, Any]


@dataclass(frozen=True)
class WarningRule:
    """Condition for a warning."""

    # whether a line and the lowest reward so far meet it; None if the line lacks the metric
    holds: Callable[[Line, float], bool | None]
    num_steps: int  # in a row, for which it must hold
    says: str  # the warning, with {…} for metrics of the line, their names with _ for /


def _is_above(limit: float, *names: str) -> Callable[[Line, float], bool | None]:
    """Return a condition: any of these metrics is above a limit."""

    def holds(line: Line, _: float) -> bool | None:
        magnitudes = [abs(line[name]) for name in names if name in line]
        return max(magnitudes) > limit if magnitudes else None

    return holds


def _cut_responses(line: Line, _: float) -> bool | None:
    """Return whether most responses are truncated, in turns of more than a few tokens."""
    # A turn of a few tokens is an action, which need not end by itself.
    if "response_length/clip_ratio" not in line:
        return None
    per_turn = line.get("response_length/mean", math.inf) / max(line.get("env/num_turns", 1.0), 1.0)
    return bool(line["response_length/clip_ratio"] > 0.5 and per_turn > FEW_TOKENS)


def _lowest_reward(line: Line, lowest: float) -> bool | None:
    """Return whether every episode got the lowest reward so far, and none succeeded."""
    if "reward/max" not in line:
        return None
    return bool(line["reward/max"] <= lowest + EQUAL and line.get("env/success_rate", 0.0) == 0)


def _equal_rewards(line: Line, _: float) -> bool | None:
    """Return whether the rewards of each group were equal, and nothing else trains."""
    if "frac_reward_zero_std" not in line:
        return None
    return bool(line["frac_reward_zero_std"] >= 1 and "teacher/kl" not in line)


def _no_gradient(line: Line, _: float) -> bool | None:
    """Return whether the gradient is zero although rewards differ."""
    if "actor/grad_norm" not in line:
        return None
    return bool(line["actor/grad_norm"] == 0 and line.get("frac_reward_zero_std", 0.0) < 1)


RULES: Final[dict[str, WarningRule]] = {
    "reward": WarningRule(
        _lowest_reward,
        10,
        "every reward of the last 10 steps was the lowest so far, {reward_max:.4g}: read a few "
        "episodes (rlearner show), check the reward and the answer format that the prompt asks "
        "for, or begin with easier tasks",
    ),
    "equal_rewards": WarningRule(
        _equal_rewards,
        5,
        "in the last 5 steps all rewards of each group were equal, so every advantage was zero: "
        "use tasks that are neither solved nor hopeless, a larger group_size, or a higher "
        "temperature",
    ),
    "clip_ratio": WarningRule(
        _cut_responses,
        1,
        "{response_length_clip_ratio:.0%} of the responses were cut for their length: raise "
        "sampling.max_tokens or max_context_tokens, or check that the model knows how to end (its "
        "chat template, sampling.stop)",
    ),
    "entropy": WarningRule(
        lambda line, _: line["actor/entropy"] < 0.01 if "actor/entropy" in line else None,
        5,
        "the policy's entropy is {actor_entropy:.2g}, near zero for 5 steps, so it no longer "
        "explores: lower train.lr, raise algorithm.entropy_coef or clip_high, or go back to an "
        "earlier checkpoint",
    ),
    "kl": WarningRule(
        _is_above(10.0, "actor/kl_loss", "actor/reward_kl", "actor/ppo_kl"),
        1,
        "the divergence from the earlier policy is above 10 nats per token: lower train.lr, raise "
        "algorithm.kl_coef, and check the reward for something that can be exploited",
    ),
    "no_gradient": WarningRule(
        _no_gradient,
        1,
        "the gradient was zero although rewards differed: check that tokens are trained at all "
        "(algorithm.mask_truncated, correction_low, correction_high, advantage_clip), and "
        "train.lora.target_modules",
    ),
    "not_finite": WarningRule(
        # A non-finite norm is not written.
        _is_above(0.0, "actor/skipped"),
        1,
        "the gradient was not finite, so the update was skipped: lower train.lr, set "
        "train.max_grad_norm, or try model.dtype=float32",
    ),
}


class TrainingWarnings:
    """Warnings of one run, step by step."""

    def __init__(self) -> None:
        self.active: dict[str, str] = {}  # rule to its text, of the current warnings
        self._num_met = dict.fromkeys(RULES, 0)  # steps in a row
        self._num_unmet = dict.fromkeys(RULES, 0)
        self._lowest = math.inf

    def take(self, line: Line) -> tuple[list[str], list[str]]:
        """Apply a step's line; return the warnings that begin with it, and those that end."""
        self._lowest = min(self._lowest, line.get("reward/min", self._lowest))
        begun_warnings = []
        ended_warnings = []
        for name, rule in RULES.items():
            holds = rule.holds(line, self._lowest)
            if holds is None:
                continue
            self._num_met[name] = self._num_met[name] + 1 if holds else 0
            self._num_unmet[name] = 0 if holds else self._num_unmet[name] + 1
            if name not in self.active and self._num_met[name] >= rule.num_steps:
                self.active[name] = rule.says.format(
                    **{key.replace("/", "_"): value for key, value in line.items()}
                )
                begun_warnings.append(self.active[name])
            elif name in self.active and self._num_unmet[name] >= OVER_AFTER:
                ended_warnings.append(self.active.pop(name))
        return begun_warnings, ended_warnings


def active_warnings(lines: Iterable[Line]) -> list[str]:
    """Return the warnings that are active after these lines."""
    signals = TrainingWarnings()
    for line in lines:
        signals.take(line)
    return list(signals.active.values())
