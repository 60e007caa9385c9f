"""Computes the metrics of a step from its groups, and writes them to ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from broker.contract import wire
from broker.system.private_files import open_private, replace, sync
from learner.algorithm.episodes import episode_rewards, episodes, num_sampled
from learner.credit.ledger import Ledger, is_zero_variance

QUANTILES: Final = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p99": 0.99, "max": 1.0}
BLOCK_BYTES: Final = 2**16  # per read when searching for a line from the end


def step_metrics(groups: Sequence[wire.Group], version: int) -> dict[str, float]:
    """Return reward, environment, response and staleness metrics of a step.

    Args:
        groups: the trained groups, at least one; without tokens is enough.
        version: the policy version that was trained.
    """
    found = [(group.domain, trajectory) for group in groups for trajectory in episodes(group)]
    rewards = [trajectory.reward for _, trajectory in found]
    values = {"reward/mean": _mean(rewards), "reward/max": max(rewards), "reward/min": min(rewards)}
    for domain in sorted({name for name, _ in found}):
        own = [trajectory for name, trajectory in found if name == domain]
        values[f"reward/{domain}/mean"] = _mean([trajectory.reward for trajectory in own])
        values[f"env/domain/{domain}/success_rate"] = _mean([trajectory.success for trajectory in own])
    parts = _average(trajectory.reward_parts for _, trajectory in found)
    values |= {f"reward_parts/{name}/mean": value for name, value in parts.items()}
    values["frac_reward_zero_std"] = _mean([is_zero_variance(episode_rewards(group)) for group in groups])
    values["env/success_rate"] = _mean([trajectory.success for _, trajectory in found])
    values |= {f"env/{name}": value for name, value in _average(trajectory.metrics for _, trajectory in found).items()}
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    return (
        values
        | _turns(trajectories, len(found))
        | _staleness(trajectories, version)
        | _seconds(groups)
        | _lengths(groups)
    )


def _turns(trajectories: Sequence[wire.Trajectory], num_episodes: int) -> dict[str, float]:
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    lengths = [num_sampled(trajectory) for trajectory in trajectories]
    cut = [any(turn.finish_reason == "length" for turn in trajectory.turns) for trajectory in trajectories]
    return {
        "env/valid_action_rate": _mean([turn.valid for turn in turns]),
        "env/num_turns": len(turns) / num_episodes,
        "response_length/mean": _mean(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": _mean(cut),
    }


def _staleness(trajectories: Sequence[wire.Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum number of versions that the trained tokens lag behind, per token."""
    found = [trajectory.version_runs.array().reshape(-1, 2) for trajectory in trajectories]
    runs = np.concatenate(found).astype(np.int64)
    lags, tokens = version - runs[:, 0], runs[:, 1]
    total = int(tokens.sum())
    if not total:
        return {"staleness/mean": 0.0, "staleness/max": 0.0}
    return {"staleness/mean": float((lags * tokens).sum() / total), "staleness/max": float(lags[tokens > 0].max())}


def _seconds(groups: Sequence[wire.Group]) -> dict[str, float]:
    return {
        "time/generate": _mean([group.generate_s for group in groups]),
        "time/env_step": _mean([group.env_step_s for group in groups]),
        "time/env_step_max": _mean([group.env_step_max_s for group in groups]),
        "time/reward": _mean([group.reward_s for group in groups]),
    }


def _lengths(groups: Sequence[wire.Group]) -> dict[str, float]:
    """Return quantiles of the sampled tokens of an episode, and the mean of the longest of each group."""
    of_groups = [_episode_tokens(group) for group in groups]
    lengths = [length for found in of_groups for length in found]
    values = np.quantile(lengths, list(QUANTILES.values()))
    quantiles = {f"episode_tokens/{name}": float(value) for name, value in zip(QUANTILES, values, strict=True)}
    means = {"mean": _mean(lengths), "group_max": _mean([max(found) for found in of_groups])}
    return quantiles | {f"episode_tokens/{name}": value for name, value in means.items()}


def _episode_tokens(group: wire.Group) -> list[int]:
    found: dict[int, int] = defaultdict(int)
    for trajectory in group.trajectories:
        found[trajectory.episode] += sum(turn.end - turn.start for turn in trajectory.turns)
    return list(found.values())


def count_tickets(ledger: Ledger) -> dict[str, float]:
    """Return ``ticket/*`` and ``off_policy/*``: the outcomes of all tickets so far."""
    counts = ledger.counts()
    values = {f"ticket/{name}": float(count) for name, count in counts.items()}
    values |= {f"ticket/closed_{reason}": float(count) for reason, count in sorted(ledger.state.reasons.items())}
    values["off_policy/dropped"] = float(counts["dropped"])
    values["off_policy/in_flight"] = float(len(ledger.waiting_for))
    values["off_policy/in_queue"] = float(len(ledger.arrived))
    return values


class MetricsFile:
    """File ``metrics.jsonl``: lines are written whole, and are on disk once ``write`` returns.

    It continues in a copy under the same name, so that an earlier incarnation that still runs writes to an unlinked
    file. Only lines that are cut off are read; the kernel copies the others, a GB or more per second.

    Args:
        last_step: lines of later steps and incomplete ones are cut off: they will be written again.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        temporary = path.with_suffix(".new")
        os.close(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        if path.exists():
            shutil.copyfile(path, temporary)
        self._size = _end_of(temporary, last_step)
        os.truncate(temporary, self._size)
        sync(temporary)
        replace(temporary, path)
        self._file = os.open(path, os.O_WRONLY)

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one object; after an error, call again to overwrite the same place.

        Raises:
            OSError: if the file cannot be written.
        """
        data, start = (json.dumps(line, allow_nan=False) + "\n").encode(), 0
        while start < len(data):
            start += os.pwrite(self._file, data[start:], self._size + start)
        os.fsync(self._file)
        self._size += len(data)

    def close(self) -> None:
        os.close(self._file)


def _end_of(path: Path, last_step: int) -> int:
    """Return the byte behind the newest complete line that is not of a later step."""
    with path.open("rb") as file:
        for end, row in _rows_from_end(file):
            try:
                if json.loads(row)["step"] <= last_step:
                    return end
            except (ValueError, TypeError, KeyError):
                continue  # not a line of this file: cut off with the rest
    return 0


def _rows_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (byte behind its newline, row without it) of every complete row, the last row first."""
    begin, rest, is_torn = file.seek(0, os.SEEK_END), b"", True
    while begin:
        size = min(BLOCK_BYTES, begin)
        begin = file.seek(begin - size)
        rest, *rows = (file.read(size) + rest).split(b"\n")  # the start of `rest` may lie before `begin`
        ends = accumulate((len(row) + 1 for row in rows), initial=begin + len(rest) + 1)
        found = list(zip(list(ends)[1:], rows, strict=True))
        if is_torn and found:
            found.pop()
            is_torn = False
        yield from reversed(found)
    if not is_torn:
        yield len(rest) + 1, rest


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file up to the first line that does not hold one."""
    lines: list[dict[str, Any]] = []
    for row in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            line = json.loads(row)
        except ValueError:  # the bytes may not even be text
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def damaged_line(path: Path) -> int:
    """Return the number of the first complete line that ``read_lines`` stops at; 0 if there is none."""
    number = len(read_lines(path)) + 1
    return number if path.is_file() and path.read_bytes().count(b"\n") >= number else 0


def damage(path: Path) -> str:
    """Return in one line that, and from which line on, ``read_lines`` does not read a file; empty if it reads all."""
    number = damaged_line(path)
    return f"{path.name}: line {number} is damaged; it and later lines are not read" if number else ""


def newest_line(path: Path) -> dict[str, Any]:
    """Return the last complete line of metrics.jsonl that can be read; empty without one."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        for _, row in _rows_from_end(file):
            try:
                line = json.loads(row)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                return line
    return {}


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values without NaN and infinities, which JSON and trackers cannot hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _average(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    collected: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            collected[name].append(value)
    return {name: _mean(values) for name, values in sorted(collected.items())}
