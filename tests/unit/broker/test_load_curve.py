"""The load curve finds how pieces of work slow each other down."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.advice.paced import PacedQueue
from bench.scale.virtual import run
from broker.runtime.load_curve import LoadCurve


@pytest.mark.parametrize(("base_s", "each_s"), [(0.01, 0.001), (0.01, 0.0), (0.0005, 0.002)])
def test_it_finds_the_speed_of_a_queue_with_few_slots(base_s: float, each_s: float) -> None:
    """40 requests of random lengths share 16 slots, again and again; the rest wait, which is not
    their work.
    """

    async def work() -> tuple[float, float]:
        queue, curve, rng = PacedQueue(16, base_s, each_s), LoadCurve(lambda: 16), random.Random(1)
        loop = asyncio.get_running_loop()

        async def ask(tokens: int) -> None:
            piece = curve.enter(loop.time())
            await queue.serve(tokens)
            curve.leave(piece, loop.time(), tokens)

        for _ in range(6):
            await asyncio.gather(*(ask(max(1, int(rng.lognormvariate(3, 1)))) for _ in range(40)))
        return curve.fit()

    found_base_s, found_each_s = run(work())
    assert found_base_s == pytest.approx(base_s, rel=0.1, abs=2e-4)
    assert found_each_s == pytest.approx(each_s, rel=0.1, abs=2e-5)


def test_a_load_that_never_changed_promises_nothing() -> None:
    """Always four at once, 0.2 s for a unit: nothing says that fewer would be faster."""
    curve = LoadCurve(lambda: 8)
    for round_ in range(5):
        pieces = [curve.enter(10.0 * round_) for _ in range(4)]
        for piece in pieces:
            curve.leave(piece, 10.0 * round_ + 2.0, 10)
    assert curve.fit() == pytest.approx((0.2, 0.0))


def test_what_failed_is_no_observation() -> None:
    curve = LoadCurve(lambda: 1)
    first, second = curve.enter(0.0), curve.enter(0.0)
    curve.leave(second, 1.0, 5)  # it never got a slot
    assert curve.fit() == (0.0, 0.0)
    curve.leave(first, 2.0, 0)
    assert curve.fit() == (0.0, 0.0)
    for second in range(3, 11):
        assert curve.fit() == (0.0, 0.0)  # fewer than eight
        curve.leave(curve.enter(second), second + 1.0, 4)
    assert curve.fit() == pytest.approx((0.25, 0.0))
