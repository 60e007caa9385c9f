"""Measure weight updates during generation: pause, lost tokens/s, and whether later output is
correct.

Windows with and without updates alternate under the same load. tokens_lost_share: 1 - tokens/s with
/ without, median of the pairs; pause_ms: how long generation stood still, mean of the updates;
update_ms: from the call to its return. After the last update the logprobs of one request must be
those of the weights that were sent, and the versions of each output must increase.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from bench.gpu import common, load
from rollout.engines.base import Engine


def main(arguments: list[str] | None = None) -> int:
    made = common.parser(__doc__)
    common.engine_options(made)
    made.add_argument(
        "--pairs", type=int, default=None, help="windows with and without updates (7, or 2)"
    )
    made.add_argument("--window-s", type=float, default=None, help="of one window (10, or 1)")
    made.add_argument("--every-s", type=float, default=None, help="between two updates (2, or 0.3)")
    made.add_argument("--mode", choices=["keep", "recompute", "abort"], default="keep")
    return common.run(_measure, made, arguments)


def _measure(options: argparse.Namespace, device: str) -> int:
    shape, dtype = (common.TINY, "float32") if options.tiny else (common.HALF_BILLION, "bfloat16")
    with tempfile.TemporaryDirectory() as folder:
        model = common.make_model(folder, shape, dtype=dtype)
        figures, checks = asyncio.run(_windows(options, model, shape, dtype))
    return common.finish(
        "update", device, shape, {"engine": options.engine, "mode": options.mode} | figures, checks
    )


class EngineLoad:
    """As many requests in flight as the engine runs, each followed by another."""

    def __init__(self, engine: Engine, number: int, vocab: int, output: tuple[int, int]) -> None:
        self._engine = engine
        self._number = number
        self._vocab = vocab
        self._output = output
        self._names = itertools.count()
        self.rising = True
        self.ended = 0  # requests that reached their length
        self._on = True
        self.tasks = [asyncio.create_task(self._one()) for _ in range(number)]

    async def _one(self) -> None:
        while self._on:
            name = next(self._names)
            (request,) = load.make_requests(
                1,
                self._vocab,
                prompt=(16, 64),
                output=self._output,
                temperature=1.0,
                name=f"load-{name}",
                seed=name,
            )
            output = await self._engine.generate(request)
            versions = [version for version, _ in output.version_runs]
            self.ended += 1
            self.rising = self.rising and not output.error and versions == sorted(set(versions))

    async def stop(self) -> None:
        """Abort what runs; with hundreds of requests the last would need another minute."""
        self._on = False
        for task in self.tasks:
            task.cancel()
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome


async def _windows(
    options: argparse.Namespace, model: str, shape: common.ModelShape, dtype: str
) -> tuple[dict[str, Any], dict[str, bool]]:
    number, output = (4, (16, 64)) if options.tiny else (256, (64, 256))
    pairs = options.pairs or (2 if options.tiny else 7)
    window_s = options.window_s or (1.0 if options.tiny else 10.0)
    every_s = options.every_s or (0.3 if options.tiny else 2.0)
    settings = load.section(options, number, 64 + output[1] + 8)
    took: list[float] = []
    rates: dict[bool, list[float]] = {False: [], True: []}
    async with load.bare(options, model, settings, dtype) as engine:
        tensors = _weights(engine, model, options.device)
        versions = itertools.count(1)

        async def updates() -> None:
            while True:
                began = time.perf_counter()
                await engine.update_weights(_nudged(tensors), next(versions), options.mode, None)
                took.append(time.perf_counter() - began)
                await asyncio.sleep(max(0.0, every_s - (time.perf_counter() - began)))

        running = EngineLoad(engine, number, shape.vocab, output)
        await asyncio.sleep(window_s)  # warm
        stood_still = engine.stats().pause_s
        for pair in range(pairs):
            for on in (False, True) if pair % 2 else (True, False):
                task = asyncio.create_task(updates()) if on else None
                before = engine.stats().generated_tokens
                began = time.perf_counter()
                await asyncio.sleep(window_s)
                rates[on].append(
                    (engine.stats().generated_tokens - before) / (time.perf_counter() - began)
                )
                if task is not None:
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
            without = rates[False][-1]
            updated = rates[True][-1]
            print(
                f"pair {pair}: {without:.0f} tokens/s without, {updated:.0f} with updates",
                flush=True,
            )
        stood_still = engine.stats().pause_s - stood_still
        await running.stop()
        exact = await _right(engine, _nudged(tensors), next(versions), shape, dtype)
    lost = [1 - on / off for on, off in zip(rates[True], rates[False], strict=True)]
    figures: dict[str, Any] = {"tokens_lost_share": round(statistics.median(lost), 4)}
    figures |= {"tokens_lost_low": round(min(lost), 4), "tokens_lost_high": round(max(lost), 4)}
    figures |= {"pause_ms": round(1000 * stood_still / max(1, len(took)), 2)}
    figures |= {
        "update_ms": round(1000 * statistics.median(took), 2),
        "update_ms_most": round(1000 * max(took), 2),
    }
    figures |= {"updates": len(took), "tokens_per_s": round(statistics.median(rates[False]), 1)}
    figures |= {
        "size_bytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    }
    checks = {
        "versions_rise": running.rising and running.ended > 0,
        "logprobs_are_of_the_new_weights": exact,
    }
    return figures, checks | {"updates_were_made": len(took) > 1}


def _weights(engine: Engine, model: str, device: str) -> dict[str, torch.Tensor]:
    """Of the engine where they can be read, else of the file, on the device where they would
    arrive.
    """
    held = engine.weights()
    if any(tensor.is_meta for tensor in held.values()):
        from safetensors.torch import load_file

        file = load_file(f"{model}/model.safetensors")
        held = {name: file[name] for name in held}
    return {name: tensor.detach().clone().to(device) for name, tensor in held.items()}


def _nudged(tensors: dict[str, torch.Tensor], factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Scale the weights in place; bfloat16 has 8 bits, so that a factor near 1 changes nothing."""
    for tensor in tensors.values():
        if tensor.is_floating_point():
            tensor.mul_(factor)
    return tensors


async def _right(
    engine: Engine,
    tensors: dict[str, torch.Tensor],
    version: int,
    shape: common.ModelShape,
    dtype: str,
) -> bool:
    """Decide whether logprobs sampled after an update are those of the new weights and differ from
    the old.
    """
    (request,) = load.make_requests(
        1, shape.vocab, prompt=(32, 32), output=(32, 32), temperature=1.0, name="last"
    )
    prompt = request.token_ids.array().tolist()
    before = await engine.logprobs(prompt)
    await engine.update_weights(_nudged(tensors, 1.0625), version, "keep", None)
    output = await engine.generate(request)
    whole = await engine.logprobs([*prompt, *load.tokens_of(output)])
    spread = float(np.abs(whole[len(prompt) - 1 :] - np.array(output.logprobs)).max())
    moved = float(np.abs(whole[: len(prompt) - 1] - before).max())
    print(
        f"sampled and scored logprobs differ by {spread:.2g}, the update moved them by {moved:.2g}",
        flush=True,
    )
    return spread < (1e-3 if dtype == "float32" else 0.5) and moved > 0


if __name__ == "__main__":
    sys.exit(main())
