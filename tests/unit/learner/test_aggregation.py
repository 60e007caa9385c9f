import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.algorithm.aggregation import MODES, BatchCounts, loss_denominator, token_weights

ROWS = st.lists(st.lists(st.floats(-10, 10), max_size=6), min_size=1, max_size=8)


def aggregate(mode, batches, max_length):
    """As the backend does it: batches of rows of token losses, summed, divided once."""
    counts, total = BatchCounts(), 0.0
    for rows in batches:
        sequence = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)
        losses = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        total += (token_weights(mode, sequence, len(rows)).double() * losses).sum().item()
        counts.add(len(losses), sum(1 for row in rows if row))
    return total / loss_denominator(mode, counts, max_length)


# Rows [1, 3], [2], and one without tokens. All 6; row sums 4 and 2, row means 2 and 2.
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 6 / 3),
        ("seq-mean-token-sum", (4 + 2) / 2),
        ("seq-mean-token-mean", (2 + 2) / 2),
        ("seq-mean-token-sum-norm", (4 + 2) / (2 * 10)),
    ],
)
def test_by_hand(mode, expected):
    rows = [[1.0, 3.0], [2.0], []]
    assert aggregate(mode, [rows], 10) == pytest.approx(expected)
    assert aggregate(mode, [rows[:1], rows[1:]], 10) == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS, cuts=st.lists(st.integers(0, 8), max_size=4))
def test_cutting_changes_nothing(mode, rows, cuts):
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [rows[a:b] for a, b in itertools.pairwise(edges)]
    assert aggregate(mode, parts, 7) == pytest.approx(
        aggregate(mode, [rows], 7), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("mode", MODES)
@given(rows=ROWS)
def test_equals_the_definition(mode, rows):
    full = [row for row in rows if row]
    sums, means = [sum(row) for row in full], [sum(row) / len(row) for row in full]
    definition = {
        "token-mean": lambda: sum(sums) / sum(len(row) for row in full),
        "seq-mean-token-sum": lambda: sum(sums) / len(full),
        "seq-mean-token-mean": lambda: sum(means) / len(full),
        "seq-mean-token-sum-norm": lambda: sum(sums) / (len(full) * 7),
    }[mode]
    assert aggregate(mode, [rows], 7) == pytest.approx(
        definition() if full else 0.0, rel=1e-5, abs=1e-5
    )


def test_norm_needs_its_constant():
    with pytest.raises(ValueError, match="maximum length"):
        loss_denominator("seq-mean-token-sum-norm", BatchCounts(3, 1))
