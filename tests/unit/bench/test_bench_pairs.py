"""How figures come from interleaved pairs."""

from __future__ import annotations

import time

import psutil
import pytest

from bench.engine import measurable
from bench.support.other_load import OtherLoad
from bench.support.paired import by_second, interval, median


def test_the_interval_holds_the_median_with_95_percent() -> None:
    assert interval([3, 1, 2]) == (1, 3)  # too few: the extremes
    assert interval(range(1, 10)) == (2, 8)  # 2 * P(Binomial(9, 1/2) < 2) = 0.039
    assert median([4, 1, 3, 2]) == 2.5


def test_what_a_second_lacks_of_its_neighbours_is_a_share_of_all() -> None:
    assert by_second([90.0, 100.0, 80.0, 100.0, 50.0], 2) == pytest.approx([0.05, 0.1])
    assert by_second([70.0, 90.0, 110.0], 3) == pytest.approx([0.1])
    # a second without any says nothing
    assert by_second([0.0, 0.0, 90.0, 100.0], 2) == pytest.approx([0.05])


def test_own_work_is_not_that_of_others() -> None:
    others, began, used = OtherLoad(), time.monotonic(), time.process_time()
    while time.process_time() - used < 0.2:
        pass
    share = others.share()
    own = 0.2 / (time.monotonic() - began) / (psutil.cpu_count() or 1)
    assert 0 <= share <= 1 - own / 2  # processor time is counted in steps of 10 ms


@pytest.mark.parametrize(("there", "engines"), [(True, ["vllm", "hf"]), (False, ["hf"])])
def test_a_bench_measures_the_engines_that_are_installed(
    there: bool, engines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "bench.engine.find_spec", lambda name: object() if there and name == "vllm" else None
    )
    assert measurable() == engines
