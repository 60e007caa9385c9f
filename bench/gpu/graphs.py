"""Compare engine hf with CUDA graphs and without: tokens/s, interleaved, identical greedy tokens.

On a CPU there are no graphs, and both engines do the same.

ratio: tokens/s with graphs by those without, median of the pairs; identical_tokens: share of equal
greedy tokens. Figures of the largest number of --requests have plain names, those of others end in
the number.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from functools import partial
from typing import Any, Final

from bench.gpu import common, load
from bench.gpu.engine import compare_arms

KV_GIB: Final = 16.0  # of each of the two engines


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    made.add_argument(
        "--requests", type=int, nargs="+", default=None, help="at once (64 256, or 8)"
    )
    made.add_argument("--pairs", type=int, default=3)
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape, dtype = (common.TINY, "float32") if options.tiny else (common.HALF_BILLION, "bfloat16")
    options.engine = "hf"
    options.engine_args = {} if options.tiny else {"kv_cache_gib": KV_GIB}
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, shape, dtype=dtype)
        figures, checks = asyncio.run(_compare(options, model, shape, dtype))
    return common.finish("graphs", device, shape, figures, checks)


async def _compare(
    options: argparse.Namespace, model: str, shape: common.ModelShape, dtype: str
) -> tuple[dict[str, Any], dict[str, bool]]:
    numbers = sorted(options.requests or ([8] if options.tiny else [64, 256]))
    prompt, output = ((8, 24), (8, 16)) if options.tiny else ((128, 384), (32, 96))
    settings = load.section(options, numbers[-1], prompt[1] + output[1] + 8)
    without = settings.model_copy(
        update={"engine_args": settings.engine_args | {"enforce_eager": True}}
    )
    figures: dict[str, Any] = {"requests": numbers}
    checks: dict[str, bool] = {}
    async with (
        load.bare(options, model, without, dtype) as eager,
        load.bare(options, model, settings, dtype) as graphs,
    ):
        arms: dict[str, load.Ask] = {"eager": eager.generate, "graphs": graphs.generate}
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


if __name__ == "__main__":
    sys.exit(main())
