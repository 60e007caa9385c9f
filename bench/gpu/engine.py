"""Compare an engine behind a rollout server with the same engine bare: tokens/s, interleaved,
identical greedy tokens.

Both hold a model on the same GPU, so an engine that reserves a share of its memory needs less than
half: --engine vllm --engine-args '{"gpu_memory_utilization": 0.4}'

ratio: the server's tokens/s by the bare engine's, median of the pairs; identical_tokens: share of
equal greedy tokens. Figures of the largest number of --requests have plain names, those of others
end in the number.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bench.gpu import common, load
from broker.contract import wire


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    common.engine_options(made)
    made.add_argument(
        "--requests", type=int, nargs="+", default=None, help="at once (64 256, or 8)"
    )
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
    numbers = sorted(options.requests or ([8] if options.tiny else [64, 256]))
    prompt, output = ((8, 24), (8, 16)) if options.tiny else ((128, 384), (32, 96))
    settings = load.section(options, numbers[-1], prompt[1] + output[1] + 8)
    figures: dict[str, Any] = {"requests": numbers}
    checks: dict[str, bool] = {}
    async with (
        load.bare(options, model, settings, dtype) as engine,
        load.served(options, model, settings, dtype) as ask,
    ):
        arms: dict[str, load.Ask] = {"bare": engine.generate, "server": ask}
        for number in numbers:
            ending = "" if number == numbers[-1] else f"_{number}"
            requests = partial(
                load.make_requests, number, shape.vocab, prompt=prompt, output=output
            )
            measured, verdicts = await compare_arms(arms, requests, options.pairs, dtype)
            figures |= {name + ending: value for name, value in measured.items()}
            checks |= {name + ending: verdict for name, verdict in verdicts.items()}
            common.show(figures)
    return figures, checks


async def compare_arms(
    arms: Mapping[str, load.Ask],
    make_requests: Callable[..., list[wire.GenerateRequest]],
    pairs: int,
    dtype: str,
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return figures and checks of two arms under the same requests, alternating.

    Args:
        arms: by name; the figures compare the second with the first.
    """
    base, subject = arms

    async def turn(
        arm: str, name: str, temperature: float
    ) -> tuple[list[list[int]], list[int], float]:
        requests = make_requests(temperature=temperature, name=name)
        began = time.perf_counter()
        tokens = await load.all_at_once(arms[arm], requests)
        rate = sum(map(len, tokens)) / (time.perf_counter() - began)
        return tokens, [request.sampling.max_tokens for request in requests], rate

    number = len(make_requests(temperature=0.0, name="number"))
    # warms up, too
    greedy = {arm: (await turn(arm, f"greedy-{number}-{arm}", 0.0))[:2] for arm in arms}
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for pair in range(pairs):
        for arm in sorted(arms, reverse=pair % 2 == 0):
            rates[arm].append((await turn(arm, f"{number}-{arm}-{pair}", 1.0))[2])
        rounded = {arm: round(values[-1]) for arm, values in rates.items()}
        print(f"{number} requests, pair {pair}: tokens/s {rounded}", flush=True)
    identical = _share(greedy[base][0], greedy[subject][0])
    ratios = [of / to for of, to in zip(rates[subject], rates[base], strict=True)]
    figures: dict[str, Any] = {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
    }
    figures |= {
        "ratio_high": round(max(ratios), 3),
        "tokens_per_s": round(statistics.median(rates[subject]), 1),
    }
    figures |= {f"{base}_tokens_per_s": round(statistics.median(rates[base]), 1)}
    figures |= {"identical_tokens": round(identical, 4)}
    complete = all([len(each) for each in tokens] == lengths for tokens, lengths in greedy.values())
    # In bf16 the sums of a batch depend on who is in it, so on a GPU near ties may go either way;
    # on a CPU in fp32 they do not.
    same = identical >= (1.0 if dtype == "float32" else 0.5)
    return figures, {"as_many_tokens_as_asked_for": complete, "identical_tokens": same}


def _share(one: list[list[int]], other: list[list[int]]) -> float:
    """Return the share of tokens before the first difference of each pair of outputs."""
    same = 0
    for a, b in zip(one, other, strict=True):
        same += next(
            (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )
    return same / max(1, sum(map(len, one)))


if __name__ == "__main__":
    sys.exit(main())
