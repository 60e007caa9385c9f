"""Compare length estimators: error, calibration, and microseconds per turn. The last line is JSON.

python -m bench.lengths [--rows FILE.jsonl] [--run FOLDER] [--seeds 5]

The synthetic workload has groups of eight episodes of recurring tasks; a task's lengths are
lognormal around a length of its own, a part of which follows from its prompt, and all of them grow
during the run, as a policy's do. ``--rows`` adds questions with answers, or conversations
(``messages``), from a file: one line, one task, three epochs. ``--run`` adds the episodes of a run
with ``samples.keep``, in the order in which they were trained. As in a hub, 64 episodes run at
once, so the shortest turns are known first.

Errors are means of abs(log(tokens / median)) without the first tenth, for turns of a task that was
not seen before and for others (``error_again``); ``running_mean`` is the mean alone, without
corrections, as a baseline. ``pinball`` is the quantile loss of both quantiles in log tokens. The
calibration error is the largest distance between a quantile and the share of turns below it. At the
top of the line are the figures of the default estimator on the synthetic workload.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import re
import statistics
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from broker.contract import wire
from broker.settings.config import DomainSection
from envhub.lengths import ESTIMATORS
from envhub.lengths.base import UpcomingTurn
from envhub.lengths.corrections import LengthCalibration
from envhub.lengths.mean import RunningMean
from envhub.lengths.predictor import LengthPrediction, LengthPredictor
from envhub.lengths.selection import load_estimator, task_key
from learner.credit import archive

_AT_ONCE: Final = 64
_GROUP_SIZE: Final = 8
_EPOCHS: Final = 3
_LIMIT: Final = 4096
_DEFAULT: Final = DomainSection.model_fields["length_estimator"].default


class PlayedEpisode(NamedTuple):
    """The turns of one episode: context and length of each."""

    turns: Sequence[tuple[array[int], int]]
    max_tokens: int = _LIMIT


class LengthScore(NamedTuple):
    """Means over a workload, without its first tenth.

    Attributes:
        error, error_again: of turns of a task that was not seen before, and that was.
    """

    error: float
    error_again: float
    pinball: float
    below_median: float
    below_high: float

    @property
    def calibration_error(self) -> float:
        """Largest distance between a quantile and the share of turns below it."""
        return max(abs(self.below_median - 0.5), abs(self.below_high - 0.9))


def synthetic(seed: int, tasks: int = 400) -> list[PlayedEpisode]:
    """Return three epochs of tasks with p99 / median near 10 and a limit of 20 medians."""
    rng = np.random.default_rng(seed)
    prompts = [
        array("i", rng.integers(0, 1000, rng.integers(40, 200)).tolist()) for _ in range(tasks)
    ]
    told = np.array(
        [math.log(len(prompt)) + 0.4 * sum(token < 10 for token in prompt) for prompt in prompts]
    )
    own = np.log(100) + 0.5 * (told - told.mean()) / told.std() + 0.65 * rng.standard_normal(tasks)
    found: list[PlayedEpisode] = []
    for epoch in range(_EPOCHS):
        for place, task in enumerate(rng.permutation(tasks)):
            grown = 0.4 * (epoch + place / tasks) / _EPOCHS
            lengths = np.exp(own[task] + grown + 0.5 * rng.standard_normal(_GROUP_SIZE))
            found += [
                PlayedEpisode([(prompts[task], max(1, min(round(one), 2000)))], 2000)
                for one in lengths
            ]
    return found


def of_rows(path: Path, most: int = 3000) -> list[PlayedEpisode]:
    """Return three epochs of a file's rows, words and signs as tokens, each row once per epoch."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:most]]
    conversations = []
    for row in rows:
        said = row.get("messages") or [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        turns = []
        context = array("i")
        for message in said:
            words = array(
                "i",
                (
                    zlib.crc32(word.encode()) >> 1
                    for word in re.findall(r"\w+|\S", message["content"])
                ),
            )
            if message["role"] == "assistant" and words:
                turns.append((array("i", context), len(words)))
            context += words
        conversations.append(PlayedEpisode(turns))
    rng = np.random.default_rng(0)
    return [
        conversations[row] for _ in range(_EPOCHS) for row in rng.permutation(len(conversations))
    ]


def of_run(folder: Path) -> list[PlayedEpisode]:
    """Return the episodes that a run has trained on, in log order."""
    found = []
    for frame in archive.read_frames(folder / archive.FOLDER):
        if isinstance(group := frame.record().message, wire.Group):
            for one in group.trajectories:
                ids = array("i", one.token_ids.array().tolist())
                found.append(
                    PlayedEpisode(
                        [(ids[: turn.start], turn.end - turn.start) for turn in one.turns]
                    )
                )
    return found


def predictor(name: str) -> LengthPredictor:
    """Return a new one with an estimator of that name."""
    return LengthPredictor("bench", load_estimator("bench", name, {})(), LengthCalibration())


def score(name: str, episodes: Sequence[PlayedEpisode]) -> LengthScore:
    """Predict and learn a workload in order; ``mean`` without corrections if the name is empty."""
    using = predictor(name or "mean")
    bare = RunningMean()
    rows = []
    seen = set()
    # by the time of its last token
    running: list[tuple[int, int, int, LengthPrediction, tuple[int, int], bool]] = []

    def begin(episode: int, number: int, now: int, previous: int) -> None:
        context, length = episodes[episode].turns[number]
        key = task_key(episodes[episode].turns[0][0])
        turn = UpcomingTurn(context, episodes[episode].max_tokens, key, number, previous)
        made = using.predict(turn)
        quantiles = (
            (made.expected or 1, made.high or 1) if name else (round(bare.predict(turn) or 1),) * 2
        )
        heapq.heappush(running, (now + length, episode, number, made, quantiles, key in seen))

    for episode in range(min(_AT_ONCE, len(episodes))):
        begin(episode, 0, 0, 0)
    following = len(running)
    while running:
        now, episode, number, made, quantiles, is_known = heapq.heappop(running)
        length = episodes[episode].turns[number][1]
        seen.add(made.turn.task)
        using.add(made, length)
        bare.observe(made.turn, length)
        actual, low, top = (math.log(one) for one in (length, *quantiles))
        loss = _pinball(actual - low, 0.5) + _pinball(actual - top, 0.9)
        rows.append((abs(actual - low), is_known, loss, actual <= low, actual <= top))
        if number + 1 < len(episodes[episode].turns):
            begin(episode, number + 1, now, length)
        elif following < len(episodes):
            begin(following, 0, now, 0)
            following += 1
    values = np.array(rows[len(rows) // 10 :])
    of_kind = [values[values[:, 1] == known, 0] for known in (0, 1)]
    errors = [float(one.mean()) if len(one) else math.nan for one in of_kind]
    return LengthScore(*errors, *(float(one) for one in values[:, 2:].mean(axis=0)))


def _pinball(rest: float, quantile: float) -> float:
    return max(quantile * rest, (quantile - 1) * rest)


def costs(
    name: str, context_tokens: int = 1000, rounds: int = 100, repeats: int = 40
) -> tuple[float, float]:
    """Return microseconds of processor time of a prediction, and of learning a turn, with all that
    a hub does for them.

    The smallest of all repetitions, each of so many rounds: others keep the machine busy.
    """
    rng = np.random.default_rng(0)
    using = predictor(name)
    prompts = [array("i", rng.integers(0, 50_000, context_tokens).tolist()) for _ in range(50)]
    found = []
    for _ in range(repeats):
        began = time.process_time()
        made = [
            using.predict(UpcomingTurn(prompts[n % 50], 1000, n % 50 + 1, 1, 70))
            for n in range(rounds)
        ]
        between = time.process_time()
        for one, tokens in zip(made, rng.lognormal(4, 1, rounds).astype(int).tolist(), strict=True):
            using.add(one, tokens)
        found.append(
            ((between - began) / rounds * 1e6, (time.process_time() - between) / rounds * 1e6)
        )
    return min(one for one, _ in found[1:]), min(one for _, one in found[1:])


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)


def workloads(options: argparse.Namespace) -> Iterator[tuple[str, list[list[PlayedEpisode]]]]:
    """Yield each workload's name and its repetitions."""
    yield "synthetic", [synthetic(seed) for seed in range(options.seeds)]
    if options.rows is not None:
        yield "rows", [of_rows(options.rows)]
    if options.run is not None:
        yield "run", [of_run(options.run)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, help="JSON lines with question and answer, or messages"
    )
    parser.add_argument("--run", type=Path, help="folder of a run with samples.keep")
    parser.add_argument(
        "--seeds", type=int, default=5, help="repetitions of the synthetic workload"
    )
    options = parser.parse_args()
    line: dict[str, Any] = {"bench": "lengths"}
    for name in ESTIMATORS:
        predict_us, update_us = costs(name)
        line[name] = {"predict_us": round(predict_us, 1), "update_us": round(update_us, 1)}
        if name == _DEFAULT:
            line = {
                "estimator": name,
                "predict_us": round(predict_us, 1),
                "update_us": round(update_us, 1),
                **line,
            }
        print(f"{name}: a prediction takes {predict_us:.1f} us, a finished turn {update_us:.1f} us")
    for workload, repetitions in workloads(options):
        figures: dict[str, Any] = {"turns": sum(len(one.turns) for one in repetitions[0])}
        bare = None
        for name in ("", *ESTIMATORS):
            scores = [score(name, one) for one in repetitions]
            middle = LengthScore(
                *(statistics.median(values) for values in zip(*scores, strict=True))
            )
            bare = bare or middle
            figures[name or "running_mean"] = {
                "error": _rounded(middle.error),
                "error_again": _rounded(middle.error_again),
                "ratio": _rounded(middle.error / bare.error),
                "ratio_again": _rounded(middle.error_again / bare.error_again),
                "pinball": _rounded(middle.pinball),
                "below_50": _rounded(middle.below_median),
                "below_90": _rounded(middle.below_high),
                "calibration_error": _rounded(middle.calibration_error),
            }
            print(f"{workload}, {name or 'running mean'}: {figures[name or 'running_mean']}")
        line[workload] = figures
        if workload == "synthetic":
            chosen = figures[_DEFAULT]
            line |= {key: chosen[key] for key in ("ratio", "ratio_again", "calibration_error")}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
