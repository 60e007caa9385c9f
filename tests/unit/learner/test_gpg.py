"""GPG's advantages by hand."""

from __future__ import annotations

import pytest
from test_more_advantages import row

from learner.algorithm.advantages import gpg
from learner.config import AlgorithmSection


def test_groups_that_say_nothing_scale_the_others() -> None:
    # Group 0: 3 and 1, mean 2: 1 and -1. Group 1: 5 and 5: 0. Two of four rows say something: times
    # 4 / (4 - 2) = 2. With the deviation of group 0, sqrt(2): 2 / (sqrt(2) + 1e-6) = 1.4142126.
    rows = [row([0.0, 3.0], group=0), row([1.0], group=0), row([5.0], group=1), row([5.0], group=1)]
    found = gpg.estimate(rows, AlgorithmSection(norm_std=False))
    assert [one.advantages.tolist() for one in found] == [[2.0, 2.0], [-2.0], [0.0], [0.0]]
    found = gpg.estimate(rows, AlgorithmSection(norm_std=True))
    assert found[0].advantages.tolist() == pytest.approx([1.4142126, 1.4142126], abs=1e-6)


def test_rows_without_gradient_count_in_the_mean_but_not_in_the_scale() -> None:
    # Mean of 3 and 1 is 2; the second has no gradient. One trained row of one says something.
    rows = [row([3.0], group=0), row([1.0], group=0, trained=False)]
    found = gpg.estimate(rows, AlgorithmSection(norm_std=False))
    assert [one.advantages.tolist() for one in found] == [[1.0], [0.0]]


def test_no_group_says_anything() -> None:
    rows = [row([2.0], group=0), row([2.0], group=0)]
    assert not any(one.advantages.any() for one in gpg.estimate(rows, AlgorithmSection()))
