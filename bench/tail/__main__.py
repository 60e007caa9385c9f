"""Compare the schedulers with schedules that know all lengths; print one JSON object last.

The fleet runs in simulated time: the real ledger, slots, length predictor, choice of servers and
server scheduler, four servers of 16 slots, two hubs, steps of 64 groups of 8. Lengths are lognormal
with p99/median = 10 (median 400 tokens, at most 16,384). 60 % of the variance of the log lengths
belong to the task, which a predictor can learn from earlier groups of the task; the rest is luck.
Every prompt is random, so nothing can be learnt from its words.

- share_1, share_4: steps per second with max_staleness 1 and 4, of a work-conserving schedule that
  knows all lengths and holds all waiting answers in one place, under the same staleness bound: the
  best of two orders.
- oracle_share: what that schedule reaches with max_staleness 1, of the same without a bound.
- gain_over_fifo, gain_over_fifo_4: steps per second, of the same fleet without predictions, first
  come first served.

Each is the mean of the seeds, measured from the ninth step on, for as long as credit is granted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from statistics import mean

from bench.scale import virtual
from bench.tail import oracle
from bench.tail.fleet import Fleet
from bench.tail.scene import STEPS, Lengths
from broker.settings.arguments import natural

SEEDS = (1, 2)


async def _run(lengths: Lengths, max_staleness: int, *, predicts: bool) -> float:
    return await Fleet(lengths, max_staleness, predicts=predicts).run()


def measure(seed: int) -> dict[str, float]:
    """Return the figures of one seed."""
    lengths = Lengths(seed)
    bounded = 0.0
    found: dict[str, float] = {}
    for staleness in (1, 4):
        best = oracle.best(lengths, staleness)
        bounded = bounded or best
        ours, fifo = (virtual.run(_run(lengths, staleness, predicts=one)) for one in (True, False))
        found |= {f"share_{staleness}": ours / best, f"gain_{staleness}": ours / fifo}
    unbounded = oracle.run(lengths, STEPS, oracle.orders()["step"])
    return found | {"oracle_share": bounded / unbounded}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tail",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "seeds",
        metavar="SEED",
        nargs="*",
        type=natural,
        default=list(SEEDS),
        help="of lengths (1 2)",
    )
    seeds = parser.parse_args(argv).seeds
    rows = []
    for seed in seeds:
        began = time.monotonic()
        rows.append(measure(seed))
        shown = {name: round(value, 3) for name, value in rows[-1].items()}
        print(
            f"seed {seed}: {time.monotonic() - began:.0f} s: {json.dumps(shown)}", file=sys.stderr
        )
    means = {name: round(mean(row[name] for row in rows), 4) for name in rows[0]}
    means["gain_over_fifo"], means["gain_over_fifo_4"] = means.pop("gain_1"), means.pop("gain_4")
    print(json.dumps(means | {"seeds": seeds}))


if __name__ == "__main__":
    main()
