"""Groups of any size, made in a moment."""

from __future__ import annotations

import msgspec
import numpy as np

from broker.contract import wire
from broker.contract.examples import EXAMPLES

MB = 1_000_000
GROUP = EXAMPLES[wire.Group]
assert isinstance(GROUP, wire.Group)


def group(ticket: int, size: int, **changes: object) -> wire.Group:
    """One of about ``size`` bytes, all of it sampled tokens."""
    n = size // 9
    rng = np.random.default_rng(ticket)
    turn = msgspec.structs.replace(GROUP.trajectories[0].turns[0], start=0, end=n)
    whole = msgspec.structs.replace(
        GROUP.trajectories[0],
        token_ids=wire.column(rng.integers(0, 1000, n), "<i4"),
        loss_mask=wire.column(np.ones(n), "|u1"),
        logprobs=wire.column(-rng.random(n), "<f4"),
        version_runs=wire.column([3, n], "<i4"),
        turns=[turn],
    )
    return msgspec.structs.replace(GROUP, ticket=ticket, trajectories=[whole], **changes)
