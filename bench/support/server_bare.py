"""The bare engine of ``bench.server`` as a process: answers every line on stdin with one run of all
requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from broker.contract import wire

Run = Callable[[str], Awaitable[list[list[int]]]]
CONTEXT = 512


def asked(requests: list[tuple[list[int], int]], turn: str) -> list[wire.GenerateRequest]:
    return [
        wire.GenerateRequest(
            request_id=f"{turn}-{index}", conversation_id=f"{turn}-{index}", token_ids=wire.column(prompt, "<i4"),
            deadline_s=600.0,
            sampling=wire.SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for index, (prompt, length) in enumerate(requests)
    ]  # fmt: skip


async def vllm_arm(
    folder: str, requests: list[tuple[list[int], int]], threads: int
) -> tuple[Run, Callable[[], None]]:
    """Yield AsyncLLM as in the documentation of vLLM, but in the process of the server; only final
    outputs.
    """
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engines.vllm.startup import IN_PROCESS

    arguments = AsyncEngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=CONTEXT, max_num_seqs=len(requests) + 2,
        max_num_batched_tokens=4096, kv_cache_memory_bytes=2**30, enforce_eager=True, disable_log_stats=True,
        generation_config="vllm", block_size=32, distributed_executor_backend=IN_PROCESS,
    )  # fmt: skip
    llm = AsyncLLM.from_engine_args(arguments)

    async def one(name: str, prompt: list[int], length: int) -> list[int]:
        params = SamplingParams(
            max_tokens=length,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        final: Any = None
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
            final = output
        assert len(final.outputs[0].logprobs) == length
        return list(final.outputs[0].token_ids)

    async def run(turn: str) -> list[list[int]]:
        await llm.reset_prefix_cache()
        return list(
            await asyncio.gather(
                *(one(f"{turn}-{i}", prompt, length) for i, (prompt, length) in enumerate(requests))
            )
        )

    return run, llm.shutdown


async def hf_arm(
    folder: str, requests: list[tuple[list[int], int]], threads: int
) -> tuple[Run, Callable[[], None]]:
    from rollout.config import RolloutSection
    from rollout.engines.base import EngineConfig
    from rollout.engines.hf.engine import HFEngine

    section = RolloutSection(
        max_running=len(requests), max_context_tokens=CONTEXT, num_threads=threads
    )
    engine = HFEngine(EngineConfig(folder, section, device="cpu", policy_version=0))
    await engine.start()

    async def run(turn: str) -> list[list[int]]:
        outputs = await asyncio.gather(
            *(engine.generate(request) for request in asked(requests, turn))
        )
        return [list(output.token_ids) for output in outputs]

    return run, lambda: None


async def serve(engine: str, folder: str, threads: int) -> None:
    requests = [
        (prompt, length)
        for prompt, length in json.loads((Path(folder).parent / "requests.json").read_text())
    ]
    run, close = await {"vllm": vllm_arm, "hf": hf_arm}[engine](folder, requests, threads)
    print(json.dumps({"ready": True}), flush=True)
    turn = 0
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
        turn += 1
        began = time.perf_counter()
        tokens = await run(f"bare{turn}")
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
    close()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
