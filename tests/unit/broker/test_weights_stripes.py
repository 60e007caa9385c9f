"""Which bytes each rank sends, and the digest of a model that no rank holds whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.errors import WireError
from broker.weights.memory.staging import FlatBuffer, plan_of
from broker.weights.plan import LayoutPlan
from broker.weights.stripes.layout import (
    ElementRun,
    check_cover,
    even_runs,
    placed_runs,
    row_run,
    stripe_plan,
)
from broker.weights.stripes.partial_digest import digest_of_parts, partial_sums

TINY = 4096 / 2**20  # MiB, the smallest bucket


def stripes_of(
    tensors: dict[str, torch.Tensor], plan: LayoutPlan, divided: list[list[ElementRun]]
) -> list[FlatBuffer]:
    """Return each rank's stripe, filled."""
    found = []
    for runs in divided:
        flat = FlatBuffer(stripe_plan(plan, runs))
        flat.fill(
            {
                run.key: tensors[run.name].flatten()[run.first : run.first + run.count]
                for run in runs
            }
        )
        found.append(flat)
    return found


def by_rows(tensors: dict[str, torch.Tensor], num_ranks: int) -> list[list[ElementRun]]:
    """As FSDP divides: equally many rows of every tensor, the last ranks fewer or none."""
    divided: list[list[ElementRun]] = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        each, first = -(-len(tensor) // num_ranks), 0
        for runs in divided:
            if (count := min(each, len(tensor) - first)) > 0:
                runs.append(row_run(name, tensor.shape, first, count))
            first += each
    return divided


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 70)), min_size=1, max_size=6),
    num_ranks=st.integers(1, 4),
    rows=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_stripes_cover_the_model_and_their_sums_give_its_digest(
    shapes: list[tuple[int, int]], num_ranks: int, rows: bool, dtype: torch.dtype
) -> None:
    tensors = {f"t{index}": torch.randn(shape).to(dtype) for index, shape in enumerate(shapes)}
    plan = plan_of(tensors, TINY)
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    divided = (
        by_rows(tensors, num_ranks)
        if rows
        else [even_runs(sizes, rank, num_ranks) for rank in range(num_ranks)]
    )
    stripes = stripes_of(tensors, plan, [runs for runs in divided if runs])
    check_cover(plan, [stripe.plan for stripe in stripes])
    whole, rebuilt = FlatBuffer(plan), FlatBuffer(plan)
    whole.fill(tensors)
    sums = torch.zeros(1, dtype=torch.int64)
    for stripe in stripes:
        placed = placed_runs(plan, stripe.plan)
        sums = sums + partial_sums(plan, placed, stripe.buffer)
        for run in placed:
            rebuilt.buffer[run.offset : run.offset + run.stop - run.start] = stripe.buffer[
                run.start : run.stop
            ]
    assert torch.equal(rebuilt.buffer, whole.buffer)
    assert digest_of_parts(plan, sums) == whole.digest()


def test_rows_are_divided_by_hand() -> None:
    plan = plan_of({"a": torch.zeros(3, 2), "b": torch.zeros(5)}, TINY)
    assert by_rows({"a": torch.zeros(3, 2), "b": torch.zeros(5)}, 2) == [
        [ElementRun("a", 0, 4), ElementRun("b", 0, 3)],
        [ElementRun("a", 4, 2), ElementRun("b", 3, 2)],
    ]
    assert even_runs({"b": 5, "a": 6}, 1, 2) == [ElementRun("a", 5, 1), ElementRun("b", 0, 5)]
    (first, second) = placed_runs(
        plan, stripe_plan(plan, [ElementRun("b", 3, 2), ElementRun("a", 4, 2)])
    )
    assert (first.offset, first.stop - first.start) == (16, 8)  # a, after four floats
    # b begins at the next 64 bytes
    assert (second.offset, second.stop - second.start) == (64 + 12, 8)


def test_gaps_overlaps_and_foreign_runs_are_named() -> None:
    plan = plan_of({"a": torch.zeros(6), "b": torch.zeros(4)}, TINY)
    stripe = stripe_plan(plan, [ElementRun("a", 0, 6), ElementRun("b", 0, 3)])
    with pytest.raises(WireError, match="bytes of b are missing"):
        check_cover(plan, [stripe])
    with pytest.raises(WireError, match="bytes of b are sent twice"):
        check_cover(plan, [stripe, stripe_plan(plan, [ElementRun("b", 2, 2)])])
    other = plan_of({"a": torch.zeros(7), "b": torch.zeros(4)}, TINY)
    with pytest.raises(WireError, match="'a@0' is longer than the tensor"):
        placed_runs(plan, stripe_plan(other, [ElementRun("a", 0, 7)]))
    with pytest.raises(WireError, match=r"'c@0' is not a part of the model"):
        placed_runs(
            plan, stripe_plan(plan_of({"c": torch.zeros(1)}, TINY), [ElementRun("c", 0, 1)])
        )
