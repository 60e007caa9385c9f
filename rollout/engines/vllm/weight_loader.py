"""Loads new weights into a running vLLM, and holds later tokens until the probe matches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from broker.errors import UserError
from rollout.engines.base import EngineConfig, UpdateMode
from rollout.engines.vllm.conversion import serial_of, version_label
from rollout.engines.vllm.llm_client import LLMClient, first_line
from rollout.engines.vllm.startup import RunningVLLM

_SPREAD: Final = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}


class VLLMWeightLoader:
    """Loads the weights in shared memory into the workers.

    Attributes:
        opened: the running vLLM; ``llm`` is its AsyncLLM, ``asking`` the client of that.
        poisoned: whether logits were not finite, and so the KV cache may not be.
    """

    def __init__(self, opened: RunningVLLM) -> None:
        self.opened = opened
        self.llm = opened.llm
        self.asking = LLMClient(opened.llm)
        self.poisoned = False
        self._serial = 0  # of the current load
        # whether the weights of that load may be served
        self._verdict: tuple[int, asyncio.Future[bool]] | None = None
        self._wrong: set[int] = set()  # loads whose weights may not

    async def prove(self, config: EngineConfig) -> None:
        """Load the initial weights once the way updates do, and check that the logprobs do not
        change.

        Raises:
            UserError: if vLLM cannot load this model's weights by name, or computes something else
                from them.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        shared = self.opened.shared
        init = {"path": shared.path, "size_bytes": shared.size_bytes, "layout": shared.layout}
        init["views"] = self.opened.views
        try:
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init))
            logprobs_before = await self.asking.logprobs(self.opened.text)
            await reload_weights(self.llm)
            logprobs_after = await self.asking.logprobs(self.opened.text)
        except Exception as error:  # any error of a worker arrives as one
            reason = first_line(error)
            raise UserError(
                f"engine vllm cannot take new weights of {config.model_path!r}: {reason}"
            ) from error
        spread = (
            float(np.abs(logprobs_before - logprobs_after).max()) if len(logprobs_before) else 0.0
        )
        if not spread <= _SPREAD[config.dtype]:
            reason = f"after loading the same weights again, logprobs differ by {spread:.2g}"
            raise UserError(
                f"engine vllm cannot take new weights of {config.model_path!r}: {reason}"
            )

    async def note(self, version: int) -> None:
        """Label later tokens with this version."""
        self._serial += 1
        await self.llm.update_weight_version(version_label(self._serial, version))

    async def load(
        self,
        version: int,
        mode: UpdateMode,
        start_over: Callable[[], Awaitable[None]],
        *,
        received: bool = False,
    ) -> float:
        """Load new weights between two tokens and return the seconds of pause. Later tokens wait
        for ``judge``.

        Args:
            received: take them from the transfer that the workers have begun, not from shared
                memory.
            start_over: with ``keep``, restarts requests that have no token yet, which might reuse
                old blocks.
        """
        core = self.llm.engine_core
        began = time.perf_counter()
        # pause_generation would sleep another 20 ms. Clearing the cache makes running requests
        # recompute their KV.
        mode = "abort" if self.poisoned else mode
        await core.pause_scheduler_async(
            mode="abort" if mode == "abort" else "keep", clear_cache=mode != "keep"
        )
        try:
            if self.poisoned:
                await self.llm.collective_rpc("wipe_kv_cache")
                self.poisoned = False
            self._verdict = (self._serial + 1, asyncio.get_running_loop().create_future())
            # before the workers load: a failure halfway leaves unknown weights
            await self.note(version)
            await reload_weights(self.llm, received=received)
            # the cache cannot be cleared while requests hold blocks; a new salt hides them
            if mode == "keep":
                self.asking.salt += 1
                await start_over()
        finally:
            await core.resume_scheduler_async()
        return time.perf_counter() - began

    def judge(self, matched: bool) -> None:
        """Record whether the last load is complete and its probe matched."""
        if self._verdict is not None and not self._verdict[1].done():
            self._verdict[1].set_result(matched)
            if not matched:
                self._wrong.add(self._verdict[0])

    async def wrong_since(self, completion: Any) -> int | None:
        """Return the first load whose tokens in this output may not be released; None if all may."""
        for span in completion.weight_versions or ():
            if not await self.good(span.version):
                return serial_of(span.version)
        return None

    async def good(self, noted: str) -> bool:
        """Return whether tokens of the load with this label may be released, once that is known."""
        serial = serial_of(noted)
        if self._verdict is not None and serial == self._verdict[0]:
            return await asyncio.shield(self._verdict[1])
        return serial not in self._wrong


async def reload_weights(llm: Any, *, received: bool = False) -> None:
    """Make all workers load the weights in shared memory, or those of the transfer that they have
    begun.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest({"received": received}))
    await llm.finish_weight_update()
