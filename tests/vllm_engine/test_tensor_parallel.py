"""One engine over two workers, each with its shard of every layer: new weights in flight, and what
a worker reads of them.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import hf_models as models
import torch
from conftest import config_of
from vllm_kit import CLOSE, assert_reread, in_flight, prompt, renewed

from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.engines.vllm.engine import VLLMEngine

pytestmark = pytest.mark.asyncio(loop_scope="session")


def shared_bytes(pid: int) -> tuple[int, int]:
    """Of the shared weights: mapped by a process, and touched by it."""
    size = touched = 0
    ours = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            ours = "rlearner-weights" in rest
        elif ours and name in ("Size:", "Rss:"):
            size += 1024 * int(rest.split()[0]) * (name == "Size:")
            touched += 1024 * int(rest.split()[0]) * (name == "Rss:")
    return size, touched


async def test_two_workers_take_new_weights_in_flight_and_read_their_shards(tmp_path: Path) -> None:
    tiny = TinyModel(
        hidden_size=512,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=2048,
    )
    folder = build_tiny(tmp_path / "model", tiny)
    engine = VLLMEngine(
        config_of(str(folder), engine_args={"tensor_parallel": 2, "kv_cache_gib": 0.1})
    )
    await engine.start()
    try:
        ids, context = prompt(30), prompt(11)
        old, (new, tensors) = models.load(folder), renewed(folder)
        torch.testing.assert_close(
            torch.tensor(await engine.logprobs(ids)),
            models.logprobs(old, ids[:1], ids[1:]),
            atol=CLOSE,
            rtol=0,
        )
        task = await in_flight(engine, context)
        await engine.update_weights(tensors, 1, "recompute", None)
        output = await task
        assert_reread(old, new, context, output)
        workers = [
            each for each in psutil.Process().children(recursive=True) if "Worker_TP" in each.name()
        ]
        assert len(workers) == 2
        for worker in workers:
            mapped, touched = shared_bytes(worker.pid)
            assert mapped > 20e6
            # of layers cut by their inputs each row has a part of both
            assert 0.4 * mapped < touched < 0.95 * mapped
    finally:
        await engine.close()
