"""Compare the engine ``hf`` with transformers' static batches and continuous batching.

    python -m bench.engine [--requests 64] [--repeats 5] [--hidden 256] [--layers 4]

Every arm serves the same requests on the same small Qwen3 (prompts of 16-128 tokens, outputs of
16-128, no end token), samples at temperature 1 and returns the logprob of every sampled token. Only
requested tokens count, not those that the static batch generates beyond a row's length. The arms
alternate in one run; figures are medians. Then the load of the quickstart on its model: 128
conversations of 8 turns, each 25 new tokens of context and 2 sampled ones. With --model the
requests go to that model instead. The last line is one JSON object: ratio_to_static,
ratio_to_continuous, tokens_per_s, turns_per_s, and linear_tokens_per_s: as many as if a pass were
its linear layers alone, with a row for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import transformers
from transformers.generation import ContinuousBatchingConfig

from broker.contract import wire
from broker.contract.checks import MAX_REQUEST_S
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine import HFEngine

Requests = list[tuple[list[int], int]]  # prompt, output length


def make_requests(number: int, vocab_size: int, seed: int = 0) -> Requests:
    """Return prompts and output lengths of 16 to 128 random tokens."""
    rng = np.random.default_rng(seed)
    sizes = (rng.integers(16, 129) for _ in range(number))
    return [
        (rng.integers(3, vocab_size, size).tolist(), int(rng.integers(16, 129))) for size in sizes
    ]


def measurable() -> list[str]:
    """Return the installed engines that have a bare form to compare with."""
    return [*(["vllm"] if find_spec("vllm") else []), "hf"]


def make_model(folder: str, hidden: int, layers: int) -> int:
    """Write a small Qwen3 with random weights; return its vocabulary size."""
    config = transformers.Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3 * hidden,
        vocab_size=2048,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return int(config.vocab_size)


def load(folder: str, dtype: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    )
    return model.eval()


def linear_tokens_per_s(folder: str, dtype: str, rows: int, repeats: int) -> float:
    """Return rows per second of a model's linear layers, one after the other, and nothing else."""
    layers = [m for m in load(folder, dtype).modules() if isinstance(m, torch.nn.Linear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features).to(m.weight.dtype) for m in layers}

    def run() -> int:
        with torch.inference_mode():
            for layer in layers:
                layer(inputs[layer.in_features])
        return rows

    return statistics.median(timed(run) for _ in range(repeats + 1))


def static_arm(folder: str, dtype: str, requests: Requests) -> Callable[[], int]:
    """One left-padded batch, generated to the longest output; logprobs from the scores of every
    step.
    """
    model = load(folder, dtype)
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in requests])
    mask = torch.tensor(
        [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in requests]
    )
    most = max(length for _, length in requests)

    def run() -> int:
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, min_new_tokens=most, max_new_tokens=most,
                do_sample=True, top_k=0, pad_token_id=0,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
            logprobs = model.compute_transition_scores(
                out.sequences, out.scores, normalize_logits=True
            )
        assert logprobs.shape == (len(requests), most)
        return sum(length for _, length in requests)

    return run


def continuous_arm(folder: str, requests: Requests, manager: Any) -> Callable[[], int]:
    """transformers' continuous batching on a manager that stays open."""
    turn = 0

    def run() -> int:
        nonlocal turn
        turn += 1
        for index, (prompt, length) in enumerate(requests):
            manager.add_request(
                prompt, request_id=f"{turn}-{index}", max_new_tokens=length, eos_token_id=-1
            )
        tokens = 0
        for _ in requests:
            result = manager.get_result(timeout=120)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            assert len(result.logprobs) == len(result.generated_tokens)
            tokens += len(result.generated_tokens)
        return tokens

    return run


async def ours(engine: HFEngine, requests: Requests, turn: int) -> int:
    asked = [
        wire.GenerateRequest(
            request_id=f"{turn}-{index}",
            conversation_id=f"{turn}-{index}",
            token_ids=wire.column(prompt, "<i4"),
            sampling=wire.SamplingParams(max_tokens=length, ignore_eos=True),
            # a slow machine must not cut answers short
            deadline_s=MAX_REQUEST_S,
        )
        for index, (prompt, length) in enumerate(requests)
    ]
    outputs = await asyncio.gather(*(engine.generate(request) for request in asked))
    assert all(len(o.logprobs) == length for o, (_, length) in zip(outputs, requests, strict=True))
    return sum(len(o.token_ids) for o in outputs)


def timed(run: Callable[[], int]) -> float:
    began = time.perf_counter()
    tokens = run()
    return tokens / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--requests", type=int, default=64)
    add("--repeats", type=int, default=5)
    add("--hidden", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--model", metavar="FOLDER", help="a model instead of the generated one")
    add("--dtype", choices=["float32", "bfloat16"], default="float32")
    add(
        "--threads",
        type=int,
        default=int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1,
    )
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            vocab_size = make_model(folder, options.hidden, options.layers)
        else:
            vocab_size = transformers.AutoConfig.from_pretrained(options.model).vocab_size
        requests = make_requests(options.requests, vocab_size)
        figures = compare(options.model or folder, requests, options)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(f"{folder}/model", TinyModel())
        figures["turns_per_s"] = asyncio.run(turns_per_s(f"{folder}/model", options))
    print(json.dumps(figures))


async def turns_per_s(
    folder: str, options: argparse.Namespace, conversations: int = 128, turns: int = 8
) -> float:
    """Return turns per second of many short growing conversations: the best run without the first."""
    section = RolloutSection(max_running=128, max_context_tokens=512, num_threads=options.threads)
    engine = HFEngine(EngineConfig(folder, section, policy_version=0))
    await engine.start()
    rng = np.random.default_rng(0)

    async def talk(name: str) -> None:
        context = rng.integers(8, 90, 60).tolist()
        for turn in range(turns):
            sampling = wire.SamplingParams(max_tokens=2, ignore_eos=True)
            ids = wire.column(context, "<i4")
            name_now = f"{name}-{turn}"
            output = await engine.generate(
                wire.GenerateRequest(
                    request_id=name_now, conversation_id=name, token_ids=ids, sampling=sampling
                )
            )
            context += [*output.token_ids, *rng.integers(8, 90, 25).tolist()]

    rates = []
    for run in range(options.repeats + 1):
        began = time.perf_counter()
        await asyncio.gather(*(talk(f"{run}-{index}") for index in range(conversations)))
        rates.append(conversations * turns / (time.perf_counter() - began))
    await engine.close()
    return round(max(rates[1:]), 1)


def compare(folder: str, requests: Requests, options: argparse.Namespace) -> dict[str, float]:
    section = RolloutSection(
        max_running=len(requests), max_context_tokens=512, num_threads=options.threads
    )
    rates: dict[str, list[float]] = {"static": [], "continuous": [], "engine": []}
    continuous_model = load(folder, options.dtype)
    generation = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=128, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        return_logprobs=True, page_size=32, num_blocks=1024, max_batch_tokens=2048
    )
    static = static_arm(folder, options.dtype, requests)
    with asyncio.Runner() as runner, continuous_model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching, timeout=10
    ) as manager:  # fmt: skip
        engine = HFEngine(EngineConfig(folder, section, dtype=options.dtype, policy_version=0))
        runner.run(engine.start())
        continuous = continuous_arm(folder, requests, manager)
        for turn in range(options.repeats + 1):
            new = {"static": timed(static), "continuous": timed(continuous)}
            new["engine"] = timed(lambda turn=turn: runner.run(ours(engine, requests, turn)))  # type: ignore[misc]
            shown = "  ".join(f"{name} {rate:.0f} tokens/s" for name, rate in new.items())
            print("warm-up" if turn == 0 else f"turn {turn}", shown, sep="  ")
            if turn:
                for name, rate in new.items():
                    rates[name].append(rate)
        runner.run(engine.close())
    median = {name: statistics.median(values) for name, values in rates.items()}
    pairs = {
        name: zip(rates["engine"], rates[name], strict=True) for name in ("static", "continuous")
    }
    figures = {
        f"ratio_to_{k}": round(statistics.median(e / o for e, o in v), 3) for k, v in pairs.items()
    }
    figures |= {
        "tokens_per_s": round(median["engine"], 1),
        "static_tokens_per_s": round(median["static"], 1),
    }
    return figures | {
        "continuous_tokens_per_s": round(median["continuous"], 1),
        "linear_tokens_per_s": round(
            linear_tokens_per_s(folder, options.dtype, len(requests), options.repeats), 1
        ),
        "threads": options.threads,
    }


if __name__ == "__main__":
    main()
