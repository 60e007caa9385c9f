"""Measure how close a hub comes to the throughput of its generation server, for 1 to 4,096
environments.

    python -m bench.envhub              # minutes: n = 1, 8, 32, 128 at 0.1 s, and environments that hang
    python -m bench.envhub --full       # also 512 at 0.1 s and 4,096 at 1 s; needs both cores

A server answers each request with a random move after a latency of L seconds, up to a tenth more or
less. The hub is a separate process as users start it: tickets from a broker, the shipped FrozenLake
with token context, groups to the samples log. With n environments and T turns an episode, at most n
/ (L·T) episodes per second are possible; share is the achieved part, counted in turns. bare_share
is that of a client which sends n such requests, waits for all, and repeats. mib_per_env is the
growth of the hub's memory per environment, from the smallest to the largest n, with a request of
each in flight. hub_ms_per_turn is the hub's processor time per turn, including groups and tickets.

share_with_hangs: n environments in separate processes, one in twenty of which hangs forever,
against as many healthy ones as remain. The last line is one JSON object: rows of {n, latency_s,
share, failed, …}, mib_per_env and share_with_hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.support.hub_scene import HubScene, scene
from broker.channel import carriers
from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import Bus
from broker.system.children import spawn

QUICK: Final = ((1, 0.1), (8, 0.1), (32, 0.1), (128, 0.1))  # (n, latency in seconds)
FULL: Final = (*QUICK, (512, 0.1), (4096, 1.0))
HANGING_N = 40
HANGING_LATENCY_S = 1.0
HANGING_SHARE = 20
# tokens of a bare request, about as many as a lake's conversation has in the middle
CONTEXT: Final = 60
# environments for each episode of a group, so that groups of few do not keep a small hub waiting
PER_GROUP: Final = 32
GROUP_SIZE: Final = 8


async def row(folder: Path, n: int, latency_s: float, seconds: float) -> dict[str, Any]:
    group_size = max(min(GROUP_SIZE, n // PER_GROUP), 1)
    async with scene(folder, n, latency_s, group_size) as made:
        await made.full()
        began = made.cpu_s()
        rate = await made.turns_per_s(seconds)
        cpu = (made.cpu_s() - began) / seconds
        turns = await made.turns_per_episode()
        mib = made.mib()
        failed = made.failed()
        made.hub.kill()
        made.hub.wait()
        bare = await _bare(made, folder, seconds)
    figures: dict[str, Any] = {
        "n": n,
        "latency_s": latency_s,
        "share": round(rate * latency_s / n, 3),
    }
    figures |= {
        "bare_share": round(bare * latency_s / n, 3),
        "episodes_per_s": round(rate / max(turns, 1.0), 1),
    }
    figures |= {"failed": failed, "group_size": group_size}
    figures |= {"hub_ms_per_turn": round(1e3 * cpu / max(rate, 1e-9), 3), "hub_mib": round(mib, 1)}
    return figures | {"load": round(os.getloadavg()[0], 1)}


async def _bare(made: HubScene, folder: Path, seconds: float) -> float:
    """Return turns per second of the bare client, measured in a separate process."""
    command = [
        sys.executable,
        "-m",
        "bench.envhub",
        "--bare",
        str(made.n),
        made.bus.link.url,
        made.server.address,
    ]
    with (folder / "bare.log").open("ab") as log:
        child = spawn(command, log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        # for what the hub asked before it was killed
        while made.server.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await made.full()
        return await made.turns_per_s(seconds)
    finally:
        child.kill()
        child.wait()


async def ask_forever(n: int, url: str, address: str) -> None:
    """Send batches of n requests one after the other."""
    bus = await Bus.connect(url, "bench", name="bench-bare", deadline_s=20)
    client = carriers.make_client("zmq", bus)
    context = wire.column(array("i", range(CONTEXT)), "<i4")
    number = 0
    while True:
        asked = []
        for _ in range(n):
            number += 1
            request = wire.GenerateRequest(
                request_id=f"bare.{number}",
                conversation_id=f"bare.{number}",
                token_ids=context,
                sampling=wire.SamplingParams(max_tokens=4, temperature=1.0, top_p=1.0, seed=number),
                min_version=0,
                deadline_s=60.0,
            )
            asked.append(client.generate(address, request, timeout_s=60.0))
        await asyncio.gather(*asked)


async def with_hangs(folder: Path, n: int, latency_s: float, seconds: float) -> dict[str, Any]:
    """Return the rate with hanging environments as a share of the rate of the healthy ones alone."""
    hanging = n // HANGING_SHARE
    rates = []
    for name, slots, hang in (("hang", n, hanging), ("sound", n - hanging, 0)):
        (folder / name).mkdir()
        async with scene(folder / name, slots, latency_s, 1, hanging=hang) as made:
            await made.full(share=1.0 - hang / slots - 0.02)
            rates.append(await made.turns_per_s(seconds))
            if made.failed():
                raise UserError(f"{made.failed()} episodes failed; see {made.log}")
    shares = {
        "share_of_ideal": round(rates[0] * latency_s / (n - hanging), 3),
        "n": n,
        "hanging": hanging,
    }
    return {"share_with_hangs": round(rates[0] / rates[1], 3), "hangs": shares}


async def measure(
    rows: tuple[tuple[int, float], ...], seconds: float, hangs: bool
) -> dict[str, Any]:
    figures: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory(prefix="bench-envhub-") as folder:
        for n, latency_s in rows:
            inside = Path(folder) / f"{n}-{latency_s:g}"
            inside.mkdir()
            figures["rows"].append(await row(inside, n, latency_s, max(seconds, 8 * latency_s)))
            print(json.dumps(figures["rows"][-1]), flush=True)
        least = figures["rows"][0]
        most = figures["rows"][-1]
        if most["n"] > least["n"]:
            figures["mib_per_env"] = round(
                (most["hub_mib"] - least["hub_mib"]) / (most["n"] - least["n"]), 4
            )
        if hangs:
            inside = Path(folder) / "hangs"
            inside.mkdir()
            figures |= await with_hangs(inside, HANGING_N, HANGING_LATENCY_S, max(seconds, 10.0))
    return figures


def _sizes(text: str) -> tuple[tuple[int, float], ...]:
    try:
        sizes = tuple(
            (int(n), float(latency))
            for n, _, latency in (part.partition("@") for part in text.split(","))
        )
    except ValueError:
        sizes = ()
    if not sizes or any(n < 1 or not 0 < latency <= 60 for n, latency in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 128@0.1,4096@1")
    return sizes


def main() -> int:
    """Measure; return 0 if no episode failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.envhub", description="Compare a hub with a bare client."
    )
    add = parser.add_argument
    add("--full", action="store_true", help="also 512 and 4,096 environments")
    add(
        "--sizes",
        type=_sizes,
        metavar="N@L,…",
        help="environments and latencies instead, for example 128@0.1",
    )
    add("--seconds", type=float, default=8.0, help="of each measurement (%(default)s)")
    add("--no-hangs", action="store_true", help="without environments that hang")
    add("--bare", nargs=3, metavar=("N", "BROKER", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare:
        uvloop.run(ask_forever(int(options.bare[0]), *options.bare[1:]))
    sizes = options.sizes or (FULL if options.full else QUICK)
    try:
        figures = uvloop.run(measure(sizes, options.seconds, not options.no_hangs))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 1 if any(row["failed"] for row in figures["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
