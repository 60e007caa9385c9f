"""What tests of the engine ``vllm`` have in common: contexts, other weights, a request in flight,
and plain forwards to compare with.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import hf_models as models
import torch

from rollout.engines.base import GenerationOutput

CLOSE = 1e-4
VOCAB = 90


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + length)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


def renewed(folder: Path, seed: int = 1) -> tuple[Any, dict[str, torch.Tensor]]:
    """Another model of the same shape, and its tensors by name."""
    model = models.load(folder)
    tensors = models.changed(model, seed)
    model.load_state_dict(tensors, strict=False)
    return model, tensors


async def in_flight(
    engine: Any, context: list[int], tokens: int = 90, name: str = "x"
) -> asyncio.Task[GenerationOutput]:
    """A request that has some tokens and is far from its end."""
    before = engine.stats().generated_tokens
    task = asyncio.create_task(
        engine.generate(models.request(name, context, max_tokens=tokens, seed=3, conversation=name))
    )
    async with asyncio.timeout(30):
        while engine.stats().generated_tokens < before + 3:  # noqa: ASYNC110 - engines tell their numbers, not when they change
            await asyncio.sleep(0)
    return task


def assert_logprobs(
    model: Any, context: list[int], output: GenerationOutput, temperature: float = 1.0
) -> None:
    expected = models.logprobs(model, context, list(output.token_ids), temperature)
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=CLOSE, rtol=0)


def split(output: GenerationOutput, versions: tuple[int, int], tokens: int = 90) -> int:
    """How many of an output's tokens are of the first version; the others are of the second."""
    (first, before), (second, after) = output.version_runs
    assert (first, second, before + after) == (*versions, tokens)
    return before


def assert_reread(
    old: Any,
    new: Any,
    context: list[int],
    output: GenerationOutput,
    versions: tuple[int, int] = (0, 1),
) -> None:
    """Each token has its version, and logprobs as if the new weights had read everything before
    their first token.
    """
    before, sampled = split(output, versions), list(output.token_ids)
    expected = torch.cat(
        [
            models.logprobs(old, context, sampled[:before]),
            models.logprobs(new, context + sampled[:before], sampled[before:]),
        ]
    )
    torch.testing.assert_close(torch.tensor(output.logprobs), expected, atol=CLOSE, rtol=0)
