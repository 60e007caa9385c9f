"""Compare an engine behind a rollout server with the same engine bare: tokens/s, interleaved, identical greedy tokens.

Both hold a model on the same GPU, so an engine that reserves a share of its memory needs less than half:
--engine vllm --engine-args '{"gpu_memory_utilization": 0.4}'

ratio: the server's tokens/s by the bare engine's, median of the pairs; identical_tokens: share of equal greedy tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from typing import Any

from bench.gpu import common, load
from broker.contract import wire


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    common.engine_options(made)
    made.add_argument("--requests", type=int, default=None, help="at once (256, or 8)")
    made.add_argument("--pairs", type=int, default=7)
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape, dtype = (common.TINY, "float32") if options.tiny else (common.HALF_BILLION, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, shape, dtype=dtype)
        figures, checks = asyncio.run(_compare(options, model, shape, dtype))
    return common.finish("engine", device, shape, {"engine": options.engine} | figures, checks)


async def _compare(
    options: argparse.Namespace, model: str, shape: common.ModelShape, dtype: str
) -> tuple[dict[str, Any], dict[str, bool]]:
    number = options.requests or (8 if options.tiny else 256)
    prompt, output = ((8, 24), (8, 16)) if options.tiny else ((128, 512), (128, 512))
    settings = load.section(options, number, prompt[1] + output[1] + 8)
    rates: dict[str, list[float]] = {"bare": [], "server": []}
    async with (
        load.bare(options, model, settings, dtype) as engine,
        load.served(options, model, settings, dtype) as ask,
    ):
        arms: dict[str, load.Ask] = {"bare": engine.generate, "server": ask}

        async def turn(
            arm: str, name: str, temperature: float
        ) -> tuple[list[list[int]], list[wire.GenerateRequest], float]:
            requests = load.make_requests(
                number, shape.vocab, prompt=prompt, output=output, temperature=temperature, name=name
            )
            began = time.perf_counter()
            found = await load.all_at_once(arms[arm], requests)
            return found, requests, sum(map(len, found)) / (time.perf_counter() - began)

        greedy = {arm: (await turn(arm, f"greedy-{arm}", 0.0))[:2] for arm in arms}  # warms up, too
        for pair in range(options.pairs):
            for arm in ("bare", "server") if pair % 2 else ("server", "bare"):
                rates[arm].append((await turn(arm, f"{arm}-{pair}", 1.0))[2])
            print(f"pair {pair}: bare {rates['bare'][-1]:.0f} tokens/s, server {rates['server'][-1]:.0f}", flush=True)
    identical = _share(greedy["bare"][0], greedy["server"][0])
    ratios = [server / one for server, one in zip(rates["server"], rates["bare"], strict=True)]
    figures: dict[str, Any] = {"ratio": round(statistics.median(ratios), 3), "ratio_low": round(min(ratios), 3)}
    figures |= {"ratio_high": round(max(ratios), 3), "tokens_per_s": round(statistics.median(rates["server"]), 1)}
    figures |= {"bare_tokens_per_s": round(statistics.median(rates["bare"]), 1)}
    figures |= {"identical_tokens": round(identical, 4), "requests": number}
    lengths = all([len(t) for t in found] == [r.sampling.max_tokens for r in asked] for found, asked in greedy.values())
    # In bf16 the sums of a batch depend on who is in it, so on a GPU near ties may go either way; on a CPU in fp32 they
    # do not.
    same = identical >= (1.0 if dtype == "float32" else 0.5)
    return figures, {"as_many_tokens_as_asked_for": lengths, "identical_tokens": same}


def _share(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of tokens before the first difference of each pair of outputs."""
    same = 0
    for a, b in zip(one, other, strict=True):
        same += next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / max(1, sum(map(len, one)))


if __name__ == "__main__":
    sys.exit(main())
