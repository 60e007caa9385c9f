"""Base class of the engines that hold no weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rollout.engines.base import EngineConfig, GenerationOutput, UpdateMode, request_problem

if TYPE_CHECKING:
    import torch

VERSION: Final = 0  # policy version of every token: the weights never change


class WeightlessEngine:
    """The part of ``rollout.engines.base.Engine`` that these engines share."""

    name: ClassVar[str]
    has_weights = False
    policy_version = VERSION

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._closed = asyncio.Event()
        self._finished: Counter[str] = Counter()
        self._generated = 0

    async def adopt(self, version: int) -> None:
        raise NotImplementedError(f"engine {self.name} has no weights")

    async def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        raise NotImplementedError(f"engine {self.name} has no weights")

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        raise NotImplementedError(f"engine {self.name} has no weights")

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    async def join(self) -> None:
        await self._closed.wait()

    def _refused(
        self, request: wire.GenerateRequest, running: Container[str]
    ) -> GenerationOutput | None:
        """Return the error output of a request that cannot be accepted, None if it can.

        Raises:
            RuntimeError: if the engine is closed.
        """
        if self._closed.is_set():
            raise RuntimeError("the engine has stopped")
        reason = request_problem(
            request, max_context_tokens=self._config.section.max_context_tokens, vocab_size=None
        )
        if not reason and request.request_id in running:
            reason = f"request_id {request.request_id!r} is already running or waiting"
        return self._count(GenerationOutput(error=reason)) if reason else None

    def _count(self, output: GenerationOutput) -> GenerationOutput:
        self._finished[output.finish_reason] += 1
        self._generated += len(output.token_ids)
        return output
