"""What new weights in flight cost a server: tokens lost, how long generation stands still, how long
a transfer takes.

    python -m bench.update [--engine hf] [--rounds 15] [--every 2] [--window 6] [--moved] [--ahead]

Without ``--engine`` it measures vllm where that is installed (``make vllm-env``, then
.venv-vllm/bin/python), else hf.

A rollout server as its own process follows a sender of weights on a private nats-server, as a
learner is one, while this process keeps ``--requests`` requests in flight, as hubs do: all of one
length and evenly spread over it, so that any second is like any other. Windows of time take turns:
nothing happens in one; new weights are sent every ``--every`` seconds, 2 at least, in the next;
with ``--moved`` there is a third in which two processes that have nothing to do with the server
broadcast as many bytes between them as often (``bench.support.update_bare``): what moving bytes
takes from a server on the same cores. A round during which processes outside this run took more
than ``--others`` of the processors does not count and is done again, ``disturbed`` times in all;
``others_share`` is what they took, the median over those that count.

``tokens_lost_share``: 1 - tokens a second with updates / without, the median over the rounds
(``*_interval`` as in bench.support.paired); ``by_second_lost_share``: the same from one second to
the next: an update begins just after a report of the server, so that each second with one is
followed by ``--every`` - 1 without; what it lacks of those, divided by ``--every``, is what updates
cost. Neighbours differ less than windows do, so this says it more sharply, but for what an update
costs after its second; ``moved_lost_share``: the same of the unrelated bytes; ``own_lost_share``:
updates against unrelated bytes; ``pause_ms``: generation stood still for new weights,
``transfer_ms``: from joining to the last confirmed bucket, ``load_ms``: from then until the version
is served, medians over the updates, as the server reports them. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import torch
import transformers

from bench.engine import make_model, measurable
from bench.server import ServedEngine, serving
from bench.support.other_load import NEVER_QUIET, OtherLoad, take_priority
from bench.support.paired import by_second, interval, median
from bench.support.update_bare import ByteMovers
from broker.contract import wire
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.sender.send import WeightSender

PROBE: Final = [9, 20, 31, 42, 53, 64, 75, 86]
SKIPPED: Final = 2  # reports after the last window


class WeightOfferer:
    """Offers slightly changed weights that are made in advance, so that they cost the server no
    processor time.
    """

    def __init__(self, served: ServedEngine, model: Any, versions: int = 8) -> None:
        self.version = -1
        self._offers: list[tuple[dict[str, torch.Tensor], wire.Probe]] = []
        for _ in range(versions):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.0005)
                table = model(torch.tensor([PROBE])).logits[0].log_softmax(-1)
                expected = table[:-1].gather(-1, torch.tensor(PROBE[1:])[:, None])[:, 0].numpy()
            tensors = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
            self._offers.append((tensors, make_probe(PROBE, expected, tolerance=1e-2)))
        self.sender = WeightSender(
            served.bus, plan_of(self._offers[0][0], 32.0), epoch=1, roster=served.roster
        )

    def offer(self) -> None:
        self.version += 1
        tensors, probe = self._offers[self.version % len(self._offers)]
        self.sender.offer(self.version, tensors, probe)


class RequestLoad:
    """Keeps requests in flight; the first ones have different lengths, so that ends spread evenly
    over time.
    """

    def __init__(self, served: ServedEngine, vocab_size: int, length: int) -> None:
        self._served = served
        self._vocab_size = vocab_size
        self._length = length
        self._numbers = itertools.count()
        self.versions: set[int] = set()
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, number: int) -> None:
        lengths = [max(1, self._length * (index + 1) // number) for index in range(number)]
        self.tasks = [
            asyncio.create_task(self._talk(index, length)) for index, length in enumerate(lengths)
        ]

    async def _talk(self, index: int, length: int) -> None:
        rng = np.random.default_rng(index)
        while True:
            prompt = rng.integers(3, self._vocab_size, 32).tolist()
            name = f"l{next(self._numbers)}"
            request = wire.GenerateRequest(
                request_id=name, conversation_id=name, token_ids=wire.column(prompt, "<i4"),
                sampling=wire.SamplingParams(max_tokens=length, ignore_eos=True), deadline_s=600.0,
            )  # fmt: skip
            reply = await self._served.client.generate(self._served.address, request, timeout_s=600)
            if reply.error:
                raise RuntimeError(reply.error)
            self.versions.update(reply.version_runs.array()[::2].tolist())
            length = self._length


class ServerReports:
    """The server's own numbers, as it publishes them every second."""

    def __init__(self, bus: Bus) -> None:
        self.rates: list[float] = []  # tokens a second, of each report
        self.pauses: dict[float, float] = {}  # by version
        self.transfers: dict[float, float] = {}
        self.loads: dict[float, float] = {}
        self._task = asyncio.create_task(self._follow(bus))

    async def _follow(self, bus: Bus) -> None:
        async for report in watch_metrics(bus):
            if report.role == "rollout":
                self.rates.append(report.values["perf/tokens_per_s"])
                version = report.values["weights/version"]
                if version > 0 and "weights/seconds" in report.values:
                    self.pauses[version] = report.values["weights/pause_seconds"]
                    self.transfers[version] = report.values["weights/seconds"]
                    self.loads[version] = report.values["weights/load_seconds"]

    def close(self) -> None:
        self._task.cancel()


async def window(
    reports: ServerReports, every: int, seconds: int, happens: Callable[[], None] | None
) -> list[float]:
    """Tokens a second, report by report, as many as the window has seconds. Updates happen just
    after every n-th of the server's reports, a second each, before and in the window; the first one
    that counts holds it."""
    first = len(reports.rates) + SKIPPED  # the reports that come next cover some time before
    seen = 0
    async with asyncio.timeout(seconds + 60):
        while (now := len(reports.rates)) < first + seconds:
            if now > seen and happens is not None and (now - first) % every == 0:
                happens()
            seen = now
            await asyncio.sleep(0.01)
    return reports.rates[first : first + seconds]


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    vocab_size = make_model(str(folder / "model"), options.hidden, options.layers)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).eval()
    size_bytes = sum(p.numel() * 4 for p in model.parameters())
    shares: list[float] = []
    by_seconds: list[float] = []
    number = disturbed = 0
    rates: dict[str, list[float]] = {
        arm: [] for arm in ("nothing", "updates", "moved") if arm != "moved" or options.moved
    }
    async with serving(options.engine, folder / "model", folder, options, frozen=False) as served:
        learner = WeightOfferer(served, model)
        reports = ServerReports(served.bus)
        load = RequestLoad(served, vocab_size, options.length)
        await learner.sender.start()
        movers = await asyncio.to_thread(ByteMovers, size_bytes) if options.moved else None
        happens = {
            "nothing": None,
            "updates": learner.offer,
            "moved": movers.move if movers is not None else None,
        }
        try:
            learner.offer()
            async with asyncio.timeout(120):
                while (seen := served.roster.get("server")) is None or seen.state != "serving":
                    await served.roster.changed(0.5)
            if options.ahead:
                take_priority()
            load.start(options.requests)
            await asyncio.sleep(options.settle)
            orders = list(itertools.permutations(rates))
            while len(rates["nothing"]) < options.rounds and disturbed <= 2 * options.rounds:
                now: dict[str, float] = {}
                neighbours: list[float] = []
                others = OtherLoad()
                for arm in orders[number % len(orders)]:
                    seconds = await window(reports, options.every, options.window, happens[arm])
                    now[arm] = mean(seconds)
                    neighbours = (
                        by_second(seconds, options.every) if arm == "updates" else neighbours
                    )
                    for task in load.tasks:
                        if task.done():
                            task.result()
                share = others.share()
                said = "  ".join(f"{arm} {rate:.0f}" for arm, rate in sorted(now.items()))
                verdict = (
                    "warm-up"
                    if not number
                    else "disturbed, does not count"
                    if share > options.others
                    else "counts"
                )
                ratio = 1 - now["updates"] / now["nothing"]
                print(
                    f"tokens/s: {said}  lost {ratio:.3f}  others {share:.2f}  {verdict}", flush=True
                )
                for arm, rate in now.items() if verdict == "counts" else ():
                    rates[arm].append(rate)
                shares += [share] if verdict == "counts" else []
                by_seconds += neighbours if verdict == "counts" else []
                disturbed += verdict.startswith("disturbed")
                number += 1
        finally:
            for task in load.tasks:
                task.cancel()
            await asyncio.gather(*load.tasks, return_exceptions=True)
            reports.close()
            await learner.sender.close()
            if movers is not None:
                await asyncio.to_thread(movers.close)
    if not rates["nothing"]:
        raise SystemExit(NEVER_QUIET)
    figures: dict[str, Any] = {"engine": options.engine}
    figures |= {**lost("tokens_lost_share", rates["updates"], rates["nothing"])}
    figures |= {"by_second_lost_share": round(median(by_seconds), 4)}
    figures |= {
        "by_second_lost_share_interval": [round(bound, 4) for bound in interval(by_seconds)]
    }
    figures |= {"by_second_pairs": len(by_seconds)}
    figures |= lost("moved_lost_share", rates["moved"], rates["nothing"]) if options.moved else {}
    figures |= lost("own_lost_share", rates["updates"], rates["moved"]) if options.moved else {}
    figures |= {"pause_ms": round(1000 * median(list(reports.pauses.values())), 2)}
    figures |= {"transfer_ms": round(1000 * median(list(reports.transfers.values())), 2)}
    figures |= {"load_ms": round(1000 * median(list(reports.loads.values())), 2)}
    figures |= {"tokens_per_s": round(median(rates["nothing"])), "updates": len(reports.pauses)}
    figures |= {"versions_seen": len(load.versions), "model_mib": round(size_bytes / 2**20, 1)}
    return figures | {
        "pairs": len(rates["nothing"]),
        "disturbed": disturbed,
        "others_share": round(median(shares), 3),
    }


def lost(name: str, rates: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Return the median of the lost share, round by round, and its interval."""
    shares = [1 - rate / other for rate, other in zip(rates, others, strict=True)]
    return {
        name: round(median(shares), 4),
        f"{name}_interval": [round(bound, 4) for bound in interval(shares)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", default=measurable()[0], help="vllm where it is installed, else hf")
    add("--rounds", type=int, default=15)
    add("--every", type=int, default=2)
    add("--window", type=int, default=6)
    add("--moved", action="store_true")
    add("--others", type=float, default=0.25)
    add(
        "--ahead",
        action="store_true",
        help="run ahead of other processes, and count all rounds (root)",
    )
    add("--settle", type=float, default=12.0)
    add("--requests", type=int, default=64)
    add("--length", type=int, default=192)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--threads", type=int, default=1)
    options = parser.parse_args()
    options.others = 1.0 if options.ahead else options.others
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlearner-bench-") as name:
        figures = asyncio.run(measure(Path(name), options))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
