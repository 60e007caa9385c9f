"""Which bytes of a model each learner rank sends; pure functions.

A stripe is a layout plan of its own, whose tensors are runs of elements of the model's:
``layers.0.up@4096`` begins at element 4096 of the flattened ``layers.0.up``. Receivers put the runs
where they belong, whatever divided the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from broker.errors import WireError
from broker.weights.plan import ITEM_BYTES, LayoutPlan, TensorSpec, make_plan

AT: Final = "@"


@dataclass(frozen=True)
class ElementRun:
    """Consecutive elements of a flattened tensor that one rank holds."""

    name: str
    first: int
    count: int

    @property
    def key(self) -> str:
        """Return its name in the plan of a stripe."""
        return f"{self.name}{AT}{self.first}"


@dataclass(frozen=True)
class PlacedRun:
    """Bytes of a stripe: from ``start`` to ``stop`` in its buffer, at ``offset`` in the model's."""

    start: int
    stop: int
    offset: int


def stripe_plan(model: LayoutPlan, runs: Iterable[ElementRun]) -> LayoutPlan:
    """Return the plan of one rank's stripe, in the model's bucket size and dtypes.

    Raises:
        UserError: if the rank holds nothing.
    """
    dtypes = {slot.spec.name: slot.spec.dtype for slot in model.slots}
    specs = [TensorSpec(run.key, (run.count,), dtypes[run.name]) for run in runs]
    return make_plan(specs, model.bucket_bytes / 2**20)


def first_elements(stripe: LayoutPlan) -> dict[str, int]:
    """Return where the runs of a stripe begin in their tensors, in elements, by their keys."""
    return {slot.spec.name: int(slot.spec.name.rpartition(AT)[2]) for slot in stripe.slots}


def placed_runs(model: LayoutPlan, stripe: LayoutPlan) -> list[PlacedRun]:
    """Return where the bytes of a stripe belong in the model, in the order of the stripe.

    Raises:
        WireError: if a run is not a part of the model.
    """
    slots = {slot.spec.name: slot for slot in model.slots}
    runs = []
    for slot in stripe.slots:
        name, _, first = slot.spec.name.rpartition(AT)
        whole = slots.get(name)
        if (
            whole is None
            or not (first.isascii() and first.isdigit())
            or slot.spec.dtype != whole.spec.dtype
        ):
            raise WireError(f"stripe: {slot.spec.name[:200]!r} is not a part of the model")
        offset = whole.offset + int(first) * ITEM_BYTES[whole.spec.dtype]
        if offset + slot.spec.size_bytes > whole.stop:
            raise WireError(f"stripe: {slot.spec.name[:200]!r} is longer than the tensor")
        runs.append(PlacedRun(slot.offset, slot.stop, offset))
    return runs


def check_cover(model: LayoutPlan, stripes: Sequence[LayoutPlan]) -> None:
    """Check that the stripes together hold every byte of the model's tensors exactly once.

    Raises:
        WireError: names the first tensor of which bytes are missing or sent twice.
    """
    pieces = sorted(
        (run.offset, run.offset + run.stop - run.start)
        for stripe in stripes
        for run in placed_runs(model, stripe)
    )
    at = 0
    for slot in model.slots:
        reached = slot.offset
        while at < len(pieces) and pieces[at][0] < slot.stop:
            if pieces[at][0] != reached:
                fault = "sent twice" if pieces[at][0] < reached else "missing"
                raise WireError(f"stripes: bytes of {slot.spec.name} are {fault}")
            reached = pieces[at][1]
            at = at + 1
        if reached != slot.stop:
            raise WireError(f"stripes: bytes of {slot.spec.name} are missing")


def even_runs(sizes: Mapping[str, int], rank: int, num_ranks: int) -> list[ElementRun]:
    """Return a rank's even share of a model that every rank holds whole; sizes in elements, by
    name.
    """
    total = sum(sizes.values())
    low = total * rank // num_ranks
    high = total * (rank + 1) // num_ranks
    runs = []
    at = 0
    for name in sorted(sizes):
        first = max(low - at, 0)
        last = min(high - at, sizes[name])
        if first < last:
            runs.append(ElementRun(name, first, last - first))
        at += sizes[name]
    return runs


def row_run(name: str, shape: Sequence[int], first_row: int, num_rows: int) -> ElementRun:
    """Return the run of consecutive rows of a tensor."""
    width = math.prod(shape[1:])
    return ElementRun(name, first_row * width, num_rows * width)
