"""Adapters in the engine ``vllm``: merged onto the model below them, it computes as their trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("peft", reason="LoRA needs the extra rlearner[lora]")

import hf_models as models
import torch
from torch_backend_kit import backend, samples
from vllm_kit import assert_logprobs, assert_reread, in_flight, prompt

from broker.weights.adapter import AdapterBase
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from learner.config import TrainSection

pytestmark = pytest.mark.asyncio(loop_scope="session")


def held(trainer: Any, folder: Path) -> Any:
    """A plain model with the trainer's merged weights."""
    model = models.load(folder)
    model.load_state_dict(dict(trainer.weights()), strict=False)
    return model


async def test_factors_make_the_engine_compute_as_the_trainer(make: Any, folder: Path) -> None:
    engine, context = await make(), prompt(12)
    settings = {
        "lr": 1e-2,
        "device": "cpu",
        "micro_batch_tokens": 64,
        "lora": {"rank": 4, "alpha": 8},
    }
    trainer = backend(str(folder), train=TrainSection.model_validate(settings))
    adapter = trainer.adapter()
    assert adapter is not None
    foundation = AdapterBase(
        plan_of(engine.weights(), 1), 1, engine.weights(), lambda: (engine.weights(), False)
    )
    assert foundation.lay(adapter) == ""
    before = held(trainer, folder)
    ids = prompt(30, seed=5)
    for version in (1, 2):
        trainer.update(samples(version))
        task = await in_flight(engine, context, name=f"r{version}")
        # kept: the update would fail
        probe = make_probe(ids, trainer.logprobs(ids), tolerance=1e-5)
        await engine.update_weights(
            foundation.merged(trainer.factors()), version, "recompute", probe
        )
        merged = trainer.weights()
        assert all(torch.equal(tensor, merged[name]) for name, tensor in engine.weights().items())
        found = torch.from_numpy(await engine.logprobs(ids))
        torch.testing.assert_close(found, trainer.logprobs(ids), atol=1e-5, rtol=0)
        output = await task
        after = held(trainer, folder)
        assert_reread(before, after, context, output, (version - 1, version))
        before = after
    assert (trainer.logprobs(ids) - backend(str(folder)).logprobs(ids)).abs().max() > 1e-2
    assert_logprobs(before, context, await engine.generate(models.request("end", context)))


async def test_factors_keep_what_runs(make: Any, folder: Path) -> None:
    engine, context = await make(), prompt(12)
    trainer = backend(
        str(folder),
        train=TrainSection.model_validate({"lr": 1e-2, "device": "cpu", "lora": {"rank": 4}}),
    )
    foundation = AdapterBase(
        plan_of(engine.weights(), 1), 1, engine.weights(), lambda: (engine.weights(), False)
    )
    adapter = trainer.adapter()
    assert adapter is not None
    assert foundation.lay(adapter) == ""
    tasks = [await in_flight(engine, context, tokens=60, name=name) for name in "ab"]
    trainer.update(samples(1))
    await engine.update_weights(foundation.merged(trainer.factors()), 1, "keep", None)
    for output in await asyncio.gather(*tasks):
        assert [version for version, _ in output.version_runs] == [0, 1]
        assert sum(count for _, count in output.version_runs) == 60
