"""The digest of a model of which each rank holds a part, without bringing the parts together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from broker.weights.digest import BucketDigest, combine, digest_of_sums, num_sums
from broker.weights.plan import LayoutPlan
from broker.weights.stripes.layout import PlacedRun


def partial_sums(model: LayoutPlan, runs: Sequence[PlacedRun], stripe: Tensor) -> Tensor:
    """Return one rank's share of the sums of all buckets, int64; the sum over ranks is for
    ``digest_of_parts``.

    Args:
        runs: of the stripe, see ``layout.placed_runs``.
        stripe: its bytes, uint8.
    """
    ordered = sorted(runs, key=lambda run: run.offset)
    scratch = torch.zeros(model.bucket_bytes, dtype=torch.uint8, device=stripe.device)
    sums = []
    following = 0
    for start, stop in model.buckets:
        while (
            following < len(ordered)
            and ordered[following].offset + _size(ordered[following]) <= start
        ):
            following += 1
        touched = []
        at = following
        while at < len(ordered) and ordered[at].offset < stop:
            run = ordered[at]
            low = max(run.offset, start)
            high = min(run.offset + _size(run), stop)
            touched.append(slice(low - start, high - start))
            scratch[touched[-1]] = stripe[
                run.start + low - run.offset : run.start + high - run.offset
            ]
            at += 1
        if touched:
            sums.append(BucketDigest(scratch[: stop - start]).sums())
        else:
            sums.append(torch.zeros(num_sums(stop - start), dtype=torch.int64))
        for part in touched:
            scratch[part] = 0
    return torch.cat(sums)


def digest_of_parts(model: LayoutPlan, sums: Tensor) -> str:
    """Return the model's hex digest from the partial sums of all ranks, added up modulo 2**64."""
    sizes = [stop - start for start, stop in model.buckets]
    parts = torch.split(sums, [num_sums(size) for size in sizes])
    return combine([digest_of_sums(size, part) for size, part in zip(sizes, parts, strict=True)])


def _size(run: PlacedRun) -> int:
    return run.stop - run.start
