"""The reward ``process_reward``: scores of turns and episodes, and notes."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from process_models import SEPARATOR, make_sample, write_classifier

from broker.errors import ConfigError
from rewardhub.rewards.base import NoScore, Sample, check_scored
from rewardhub.rewards.models.process_args import ProcessRewardArgs
from rewardhub.rewards.models.process_reward import ProcessReward


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("process") / "model")


async def score(folder: Path, *samples: Sample, **args: Any) -> list[Any]:
    reward = ProcessReward(ProcessRewardArgs(path=str(folder), separator=SEPARATOR, **args))
    return [
        check_scored(scored, sample.num_turns)
        for sample, scored in zip(
            samples, await asyncio.gather(*map(reward.score, samples)), strict=True
        )
    ]


async def test_each_turn_has_its_own_score(folder: Path) -> None:
    sample = make_sample("one\n\ntwo", "three")
    (by_step,) = await score(folder, sample, aggregate="last")
    (both, last) = by_step.value
    # A model that reads from left to right gives a turn the same score, whatever follows.
    (first,) = await score(folder, make_sample("one\n\ntwo"), aggregate="last")
    assert first.value == pytest.approx([both])
    (product,) = await score(folder, sample, aggregate="product")
    (lowest,) = await score(folder, sample)
    assert product.value[1] == lowest.value[1] == last
    (mean,) = await score(folder, sample, aggregate="mean")
    # Two steps with a and b: min and mean give both, so the product is min (2 mean - min).
    higher = 2 * mean.value[0] - lowest.value[0]
    assert both in (pytest.approx(lowest.value[0]), pytest.approx(higher))
    assert product.value[0] == pytest.approx(lowest.value[0] * higher)
    assert lowest.notes == {
        "steps": 3.0,
        "lowest": min(lowest.value),
        "truncated": 0.0,
    }


async def test_one_score_for_the_episode(folder: Path) -> None:
    sample = make_sample("one\n\ntwo", "three")
    for aggregate in ("min", "product", "mean"):
        (turns,) = await score(folder, sample, aggregate=aggregate)
        (episode,) = await score(folder, sample, aggregate=aggregate, credit="episode")
        if aggregate == "mean":
            # Two steps of the first turn, one of the second.
            assert episode.value == pytest.approx((2 * turns.value[0] + turns.value[1]) / 3)
        elif aggregate == "min":
            assert episode.value == min(turns.value)
        else:
            assert episode.value == pytest.approx(math.prod(turns.value))


async def test_nothing_said_is_the_lowest_score(folder: Path) -> None:
    empty, cut = await score(
        folder, make_sample(" "), make_sample("ab\n\ncd"), max_length=14, scale=2.0, offset=-1.0
    )
    assert (empty.value, empty.notes["steps"]) == ([-1.0], 0.0)
    assert (cut.value, cut.notes["truncated"], cut.notes["lowest"]) == ([-1.0], 1.0, 0.0)


async def test_batches_give_what_single_samples_give(folder: Path) -> None:
    samples = [make_sample("step\n\n" * number + "end") for number in range(5)]
    together = await score(folder, *samples, batch_size=3)
    alone = [(await score(folder, sample, batch_size=1))[0] for sample in samples]
    for one, other in zip(together, alone, strict=True):
        assert one.value == pytest.approx(other.value, abs=1e-6)


async def test_an_output_that_is_not_finite_is_no_score(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = ProcessReward(ProcessRewardArgs(path=str(folder), separator=SEPARATOR))
    monkeypatch.setattr(reward._queue, "_compute", lambda batch: [[math.nan] for _ in batch])
    with pytest.raises(NoScore, match="domain 'd', task 1: the model's output is not finite"):
        await reward.score(make_sample("one"))


def test_a_missing_folder_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match="path: '/nope' is not allowed; no such folder"):
        ProcessReward.check(ProcessRewardArgs(path="/nope"))
