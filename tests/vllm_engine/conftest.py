"""One vLLM for all tests of the folder, since it takes half a minute to start; each test has an
engine of its own in front of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.vllm import engine as front
from rollout.engines.vllm.startup import RunningVLLM, open_llm
from rollout.engines.vllm.weight_loader import reload_weights

sys.path.append(str(Path(__file__).parents[1] / "contract"))

MAX_CONTEXT = 128
Make = Callable[..., Awaitable[front.VLLMEngine]]


class Shared(RunningVLLM):
    """Outlives the engines in front of it."""

    used = False

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Attention on the CPU wants heads of 32 or more."""
    tiny = TinyModel(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=96
    )
    folder = build_tiny(tmp_path_factory.mktemp("vllm") / "model", tiny)
    return str(folder)


def config_of(path: str, version: int = 0, **section: Any) -> EngineConfig:
    settings = {
        "engine": "vllm",
        "max_running": 4,
        "max_context_tokens": MAX_CONTEXT,
        "num_threads": 1,
        "prefill_tokens": 64,
        **section,
    }
    return EngineConfig(path, RolloutSection(**settings), device="cpu", policy_version=version)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def opened(model_path: str) -> AsyncIterator[tuple[Shared, dict[str, torch.Tensor]]]:
    real = await asyncio.to_thread(open_llm, config_of(model_path))
    first = {name: tensor.clone() for name, tensor in real.shared.tensors.items()}
    fields = {field.name: getattr(real, field.name) for field in dataclasses.fields(RunningVLLM)}
    yield Shared(**fields), first
    await asyncio.to_thread(real.close)


@pytest_asyncio.fixture(loop_scope="session")
async def make(
    opened: tuple[Shared, dict[str, torch.Tensor]], model_path: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    """Engines with the first weights; settings that only vLLM reads are those of the shared one."""
    shared, first = opened
    made: list[front.VLLMEngine] = []

    async def engine(version: int = 0, **section: Any) -> front.VLLMEngine:
        monkeypatch.setattr(front, "open_llm", lambda _: shared)
        shared.shared.fill(first)
        if shared.used:
            await reload_weights(shared.llm)
            await shared.llm.reset_prefix_cache()
        shared.used = True
        made.append(front.VLLMEngine(config_of(model_path, version, **section)))
        await made[-1].start()
        return made[-1]

    yield engine
    for each in made:
        await each.close()


@pytest.fixture(scope="session")
def folder(model_path: str) -> Path:
    return Path(model_path)
