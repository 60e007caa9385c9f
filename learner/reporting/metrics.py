"""Computes the metrics of a step from its groups, and writes them to ``metrics.jsonl``."""

from __future__ import annotations

import json
import math
import os
import shutil
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from broker.contract import wire
from broker.contract.wire import ACTOR
from broker.system.private_files import open_private, replace, sync
from learner.algorithm.episodes import episode_rewards, final_trajectories
from learner.credit.ledger import Ledger, is_zero_variance
from learner.credit.task_pool import rates_of

QUANTILES: Final = {
    "min": 0.0,
    "p25": 0.25,
    "p50": 0.5,
    "p75": 0.75,
    "p90": 0.9,
    "p99": 0.99,
    "max": 1.0,
}
# Of a read when searching for a line from the end.
BLOCK_BYTES: Final = 2**16


def step_metrics(groups: Iterable[wire.Group], version: int) -> dict[str, float]:
    """Return reward, environment, response and staleness metrics of a step.

    Args:
        groups: the trained groups, at least one.
        version: the policy version that was trained.
    """
    step = StepFigures()
    for group in groups:
        step.add_group(group)
    return step.values(version)


class StepFigures:
    """Figures of a step's groups: a few numbers of each episode, so that no group must be kept.

    Attributes:
        num_tokens: sampled ones.
        num_samples: training sequences.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_samples = 0
        # By domain, for each episode.
        self._rewards = _new_columns()
        self._successes = _new_columns()
        # By seat, for each episode of environments with seats.
        self._seat_rewards = _new_columns()
        self._seat_successes = _new_columns()
        self._all_rewards = array("d")
        # By name, for each episode that has it.
        self._parts = _new_columns()
        self._metrics = _new_columns()
        self._seconds = _new_columns()  # by name, for each group
        self._has_no_variance = array("b")  # of each group
        self._turns = 0
        self._valid_turns = 0
        self._cut = 0
        self._longest_response = 0
        self._tokens_of_version: Counter[int] = Counter()
        self._episode_tokens = array("q")  # of each episode
        self._longest_episodes = array("q")  # of each group

    def add_group(self, group: wire.Group) -> None:
        """Count a group."""
        for episode in final_trajectories(group):
            self._all_rewards.append(episode.reward)
            self._rewards[group.domain].append(episode.reward)
            self._successes[group.domain].append(episode.success)
            if episode.seat:
                self._seat_rewards[episode.seat].append(episode.reward)
                self._seat_successes[episode.seat].append(episode.success)
            for columns, row in (
                (self._parts, episode.reward_parts),
                (self._metrics, episode.metrics),
            ):
                for name, value in row.items():
                    columns[name].append(value)
        self._has_no_variance.append(is_zero_variance(episode_rewards(group)))
        self._seconds["time/generate"].append(group.generate_s)
        self._seconds["time/env_step"].append(group.env_step_s)
        self._seconds["time/env_step_max"].append(group.env_step_max_s)
        self._seconds["time/reward"].append(group.reward_s)
        episode_tokens: Counter[int] = Counter()
        for trajectory in group.trajectories:
            self._add_trajectory(trajectory)
            episode_tokens[trajectory.episode] += sum(
                turn.end - turn.start for turn in trajectory.turns
            )
        self._episode_tokens.extend(episode_tokens.values())
        self._longest_episodes.append(max(episode_tokens.values()))

    def _add_trajectory(self, trajectory: wire.Trajectory) -> None:
        runs = trajectory.version_runs.array().reshape(-1, 2).tolist()
        num_sampled = 0
        for version, num_tokens in runs:
            self._tokens_of_version[version] += num_tokens
            num_sampled += num_tokens
        self.num_samples += 1
        self.num_tokens += num_sampled
        self._longest_response = max(self._longest_response, num_sampled)
        self._turns += len(trajectory.turns)
        self._valid_turns += sum(turn.valid for turn in trajectory.turns)
        self._cut += any(turn.finish_reason == "length" for turn in trajectory.turns)

    def values(self, version: int) -> dict[str, float]:
        """Return the metrics of the groups so far, at least one.

        Args:
            version: the policy version that was trained.
        """
        rewards = self._all_rewards
        values = {
            "reward/mean": _mean(rewards),
            "reward/max": max(rewards),
            "reward/min": min(rewards),
        }
        for domain in sorted(self._rewards):
            values[f"reward/{domain}/mean"] = _mean(self._rewards[domain])
            values[f"env/domain/{domain}/success_rate"] = _mean(self._successes[domain])
        for seat in sorted(self._seat_rewards):
            values[f"env/seat/{seat}/reward_mean"] = _mean(self._seat_rewards[seat])
            values[f"env/seat/{seat}/success_rate"] = _mean(self._seat_successes[seat])
        values |= {
            f"reward_parts/{name}/mean": _mean(self._parts[name]) for name in sorted(self._parts)
        }
        values["frac_reward_zero_std"] = _mean(self._has_no_variance)
        num_successes = math.fsum(map(math.fsum, self._successes.values()))
        values["env/success_rate"] = num_successes / len(rewards)
        values |= {f"env/{name}": _mean(self._metrics[name]) for name in sorted(self._metrics)}
        seconds = {name: _mean(column) for name, column in self._seconds.items()}
        return values | self._responses() | self._staleness(version) | seconds | self._lengths()

    def _responses(self) -> dict[str, float]:
        return {
            "env/valid_action_rate": self._valid_turns / self._turns if self._turns else 0.0,
            "env/num_turns": self._turns / len(self._all_rewards),
            "response_length/mean": self.num_tokens / self.num_samples,
            "response_length/max": float(self._longest_response),
            "response_length/clip_ratio": self._cut / self.num_samples,
        }

    def _staleness(self, version: int) -> dict[str, float]:
        """Return mean and maximum of the versions by which trained tokens lag behind."""
        lags = {
            version - sampled_by: count
            for sampled_by, count in self._tokens_of_version.items()
            if count
        }
        mean = sum(lag * count for lag, count in lags.items()) / self.num_tokens if lags else 0.0
        return {"staleness/mean": mean, "staleness/max": float(max(lags, default=0))}

    def _lengths(self) -> dict[str, float]:
        """Return quantiles of the sampled tokens of an episode, and the mean of groups' longest."""
        levels = np.quantile(self._episode_tokens, list(QUANTILES.values()))
        quantiles = {
            f"episode_tokens/{name}": float(value)
            for name, value in zip(QUANTILES, levels, strict=True)
        }
        means = {"mean": _mean(self._episode_tokens), "group_max": _mean(self._longest_episodes)}
        return quantiles | {f"episode_tokens/{name}": value for name, value in means.items()}


def _new_columns() -> defaultdict[str, array[float]]:
    return defaultdict(lambda: array("d"))


def count_tickets(ledger: Ledger) -> dict[str, float]:
    """Return ``ticket/*`` and ``off_policy/*``: the outcomes of all tickets so far."""
    counts = ledger.counts()
    values = {f"ticket/{name}": float(count) for name, count in counts.items()}
    values |= {
        f"ticket/closed_{reason}": float(count)
        for reason, count in sorted(ledger.state.reasons.items())
    }
    values["off_policy/dropped"] = float(counts["dropped"])
    values["off_policy/in_flight"] = float(len(ledger.waiting_for))
    values["off_policy/in_queue"] = float(len(ledger.arrived))
    return values


def curriculum_metrics(ledger: Ledger) -> dict[str, float]:
    """Return ``curriculum/*``: what is known of the pass rates of each domain's tasks."""
    values: dict[str, float] = {}
    for name, pool in ledger.state.pools.items():
        tasks = ledger.rules.domain(name).tasks
        if tasks is None or tasks.curriculum is None:
            continue
        stage = tasks.curriculum.stage(ledger.state.version)
        rates = rates_of(pool.levels)
        measured = rates[~np.isnan(rates)]
        values[f"curriculum/{name}/measured"] = len(measured) / len(rates)
        if len(measured):
            in_band = (measured >= stage.low) & (measured <= stage.high)
            values[f"curriculum/{name}/in_band"] = float(in_band.mean())
            values[f"curriculum/{name}/pass_rate"] = float(measured.mean())
    return values


class MetricsFile:
    """File ``metrics.jsonl``: lines are written whole, and are on disk once ``write`` returns.

    It continues in a copy under the same name, so that an earlier incarnation that still runs
    writes to an unlinked file. Only lines that are cut off are read; the kernel copies the others,
    a GB or more per second.

    Args:
        last_step: lines of later steps and incomplete ones are cut off, to be written again.
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
        data = (json.dumps(line, allow_nan=False) + "\n").encode()
        start = 0
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
                # No line of this file: it is cut off, too.
                continue
    return 0


def _rows_from_end(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (byte behind its newline, row without it) of every complete row, the last row first."""
    begin = file.seek(0, os.SEEK_END)
    partial_row = b""
    is_torn = True
    while begin:
        size = min(BLOCK_BYTES, begin)
        begin = file.seek(begin - size)
        # The start of the partial row may lie before `begin`.
        partial_row, *rows = (file.read(size) + partial_row).split(b"\n")
        ends = accumulate((len(row) + 1 for row in rows), initial=begin + len(partial_row) + 1)
        complete_rows = list(zip(list(ends)[1:], rows, strict=True))
        if is_torn and complete_rows:
            complete_rows.pop()
            is_torn = False
        yield from reversed(complete_rows)
    if not is_torn:
        yield len(partial_row) + 1, partial_row


def label_name(name: str) -> str:
    """Return the metric that holds the step of another: of an evaluation, when it began."""
    parts = name.split("/")
    if parts[0] != "eval":
        return "step"
    is_other_policy = len(parts) > 2 and parts[1] != "domain"
    return f"eval/{parts[1]}/step" if is_other_policy else "eval/step"


def step_of(line: Mapping[str, float], name: str) -> int:
    """Return the step that a line's value belongs to.

    An evaluation stands in the line of a later step: it takes longer than the step after which it
    began.
    """
    return int(line.get(label_name(name), line["step"]))


def values_by_step(line: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Return the metrics of a line by the step that they belong to; the line's own come first."""
    values: dict[int, dict[str, float]] = {int(line["step"]): {}}
    for name, value in line.items():
        if name not in ("step", "time"):
            values.setdefault(step_of(line, name), {})[name] = value
    return values


def evaluations_since(path: Path, step: int) -> set[tuple[str, int]]:
    """Return (policy, step) of the evaluations in lines of this step or later ones."""
    evaluations: set[tuple[str, int]] = set()
    if not path.exists():
        return evaluations
    with path.open("rb") as file:
        for _, row in _rows_from_end(file):
            try:
                line = json.loads(row)
                is_earlier = line["step"] < step
            # A damaged line, which no reader reads.
            except (ValueError, TypeError, KeyError):
                continue
            if is_earlier:
                break
            for name, value in line.items():
                parts = name.split("/")
                if parts[0] == "eval" and parts[-1] == "step":
                    evaluations.add((parts[1] if len(parts) > 2 else ACTOR, int(value)))
    return evaluations


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file up to the first line that does not hold one."""
    lines: list[dict[str, Any]] = []
    for row in path.read_bytes().split(b"\n") if path.is_file() else []:
        try:
            line = json.loads(row)
        # The bytes may not even be text.
        except ValueError:
            break
        if not isinstance(line, dict):
            break
        lines.append(line)
    return lines


def damaged_line(path: Path) -> int:
    """Return the number of the first complete line that ``read_lines`` stops at, or 0."""
    number = len(read_lines(path)) + 1
    return number if path.is_file() and path.read_bytes().count(b"\n") >= number else 0


def describe_damage(path: Path) -> str:
    """Return one line on the part that ``read_lines`` does not read; empty if it reads all."""
    number = damaged_line(path)
    if not number:
        return ""
    return f"{path.name}: line {number} is damaged; it and later lines are not read"


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


def finite_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values without NaN and infinities, which JSON and trackers cannot hold."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
