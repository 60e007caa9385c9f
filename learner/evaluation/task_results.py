"""The numbers of evaluated tasks, and a domain's figures of them. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from broker.contract import wire
from learner.algorithm.episodes import final_trajectories
from learner.credit.record_intake import version_bounds
from learner.evaluation import pass_at_k

QUANTILES: Final = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


@dataclass(frozen=True)
class TaskResult:
    """Numeric result of one task; the tuples have a value for each episode."""

    domain: str
    task_index: int
    successes: tuple[bool, ...]
    rewards: tuple[float, ...]
    # oldest and newest of its sampled tokens, None if nothing was sampled
    versions: tuple[int, int] | None
    # Empty from a file of an earlier version, like the following.
    tokens: tuple[int, ...] = ()  # sampled ones
    turns: tuple[int, ...] = ()
    cut: tuple[bool, ...] = ()  # whether a turn was cut for its length

    @classmethod
    def of_group(cls, group: wire.Group) -> TaskResult:
        """Return the result of a finished task."""
        episodes = final_trajectories(group)
        turns: defaultdict[int, list[wire.Turn]] = defaultdict(list)
        for trajectory in group.trajectories:
            turns[trajectory.episode] += trajectory.turns
        turns_of = [turns[episode.episode] for episode in episodes]
        return cls(
            group.domain,
            group.task_index,
            successes=tuple(episode.success for episode in episodes),
            rewards=tuple(episode.reward for episode in episodes),
            versions=version_bounds([group]),
            tokens=tuple(sum(turn.end - turn.start for turn in own) for own in turns_of),
            turns=tuple(map(len, turns_of)),
            cut=tuple(any(turn.finish_reason == "length" for turn in own) for own in turns_of),
        )

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> TaskResult:
        """Return the result that a row of a file holds.

        Raises:
            KeyError, TypeError, ValueError: if it is not as ``plain`` makes it.
        """
        versions = row["versions"]
        return cls(
            str(row["domain"]),
            int(row["task_index"]),
            successes=tuple(bool(success) for success in row["success"]),
            rewards=tuple(float(reward) for reward in row["reward"]),
            versions=None if versions is None else (int(versions[0]), int(versions[1])),
            tokens=tuple(map(int, row.get("tokens", ()))),
            turns=tuple(map(int, row.get("turns", ()))),
            cut=tuple(map(bool, row.get("cut", ()))),
        )

    def plain(self) -> dict[str, Any]:
        """Return the result as a part of a row."""
        return {
            "domain": self.domain,
            "task_index": self.task_index,
            "success": list(self.successes),
            "reward": list(self.rewards),
            "versions": self.versions,
            "tokens": list(self.tokens),
            "turns": list(self.turns),
            "cut": list(self.cut),
        }


def domain_figures(tasks: Sequence[TaskResult]) -> dict[str, float]:
    """Return the actor's metrics of a domain in addition to its success rate.

    They are the mean and quantiles of rewards and lengths, the share of episodes with a cut turn,
    the mean of turns, and avg@k and pass@k.
    """
    values = pass_at_k.pass_at_k_metrics([task.successes for task in tasks])
    columns: dict[str, list[float]] = {
        "reward": [reward for task in tasks for reward in task.rewards],
        "episode_tokens": [num_tokens for task in tasks for num_tokens in task.tokens],
    }
    for name, column in columns.items():
        if column:
            levels = np.quantile(column, list(QUANTILES.values()))
            values[f"{name}_mean"] = statistics.fmean(column)
            values |= {
                f"{name}_{quantile}": float(level)
                for quantile, level in zip(QUANTILES, levels, strict=True)
            }
    if turns := [num_turns for task in tasks for num_turns in task.turns]:
        values["num_turns"] = statistics.fmean(turns)
        values["clip_ratio"] = statistics.fmean(is_cut for task in tasks for is_cut in task.cut)
    return values
