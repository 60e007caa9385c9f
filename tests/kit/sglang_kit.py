"""An engine ``sglang`` in front of the double, and the model as its trainer holds it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import TINY
from sglang_double import Double, double

from rlearner_text.tiny import build_tiny
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig
from rollout.engines.hf.model import SlotModel
from rollout.engines.sglang.engine import SGLangEngine


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_tiny(tmp_path_factory.mktemp("sglang") / "model", TINY))


@pytest.fixture(scope="module")
def trained(model_path: str) -> SlotModel:
    """The model as a trainer holds it."""
    return SlotModel(
        EngineConfig(
            model_path, RolloutSection(max_context_tokens=400, max_running=2), device="cpu"
        )
    )


def config(model_path: str, command: list[str], *, version: int = 0, **args: Any) -> EngineConfig:
    section = RolloutSection(
        engine="sglang",
        max_running=4,
        max_context_tokens=400,
        engine_args={"command": command, **args},
    )
    return EngineConfig(model_path, section, device="cpu", policy_version=version)


@pytest.fixture
async def server() -> AsyncIterator[Double]:
    async with double() as made:
        yield made


@pytest.fixture
async def engine(server: Double, model_path: str) -> AsyncIterator[SGLangEngine]:
    made = SGLangEngine(config(model_path, server.command))
    await made.start()
    yield made
    await made.close()


def scaled(trained: SlotModel, factor: float) -> dict[str, torch.Tensor]:
    return {name: tensor * factor for name, tensor in trained.weights().items()}


def logprobs_under(
    trained: SlotModel, weights: dict[str, torch.Tensor], tokens: list[int]
) -> np.ndarray:
    """By the trainer's model, which keeps its own weights."""
    own = {name: tensor.clone() for name, tensor in trained.weights().items()}
    trained.load_weights(weights)
    try:
        return trained.logprobs(tokens).numpy()
    finally:
        trained.load_weights(own)
