"""New weights in a running vLLM: its workers load them between two tokens, and what is sampled meanwhile waits for the probe."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from broker.errors import UserError
from rollout.engines.base import EngineConfig, UpdateMode
from rollout.engines.vllm.output import label, serial_of
from rollout.engines.vllm.scoring import Asking, first_line
from rollout.engines.vllm.start import Opened

_SPREAD: Final = {"float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}


class Loading:
    """Brings what stands in the shared memory into the workers.

    Attributes:
        opened: the running vLLM; ``llm`` is its AsyncLLM, ``asking`` asks it.
        poisoned: logits were not finite, so the KV cache may not be.
    """

    def __init__(self, opened: Opened) -> None:
        self.opened, self.llm, self.asking = opened, opened.llm, Asking(opened.llm)
        self.poisoned = False
        self._serial = 0  # of the load that is sampled from
        self._verdict: tuple[int, asyncio.Future[bool]] | None = None  # whether what that load brought may be served
        self._wrong: set[int] = set()  # loads that may not

    async def prove(self, config: EngineConfig) -> None:
        """Load the weights once through the path that updates take, and find the model as vLLM itself has loaded it.

        Raises:
            UserError: vLLM cannot take this model's weights by their names, or computes something else from them.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        shared = self.opened.shared
        init = {"path": shared.path, "size_bytes": shared.size_bytes, "layout": shared.layout}
        tokens = [1 + i % (self.opened.vocab_size - 1) for i in range(min(12, config.section.max_context_tokens - 1))]
        try:
            await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init))
            before = await self.asking.logprobs(tokens)
            await reload(self.llm)
            after = await self.asking.logprobs(tokens)
        except Exception as error:  # whatever a worker raised arrives as one
            raise UserError(f"engine vllm cannot take new weights of {config.model_path!r}: {first_line(error)}") from error
        spread = float(np.abs(before - after).max()) if len(before) else 0.0
        if not spread <= _SPREAD[config.dtype]:
            raise UserError(
                f"engine vllm cannot take new weights of {config.model_path!r}: after loading the same weights again, logprobs "
                f"differ by {spread:.2g}"
            )

    async def note(self, version: int) -> None:
        """Tokens from here on bear this version."""
        self._serial += 1
        await self.llm.update_weight_version(label(self._serial, version))

    async def load(self, version: int, mode: UpdateMode, start_over: Callable[[], Awaitable[None]]) -> float:
        """New weights between two tokens; the seconds that generation stood still. What is sampled after that waits for ``judge``.

        Args:
            start_over: with ``keep``: asks again for requests that have no token yet, as they may find old blocks still.
        """
        core = self.llm.engine_core
        began = time.perf_counter()
        # Not pause_generation: it would sleep 20 ms more. Clearing the cache takes the KV of running requests, too: they read it anew.
        mode = "abort" if self.poisoned else mode
        await core.pause_scheduler_async(mode="abort" if mode == "abort" else "keep", clear_cache=mode != "keep")
        try:
            if self.poisoned:
                await self.llm.collective_rpc("wipe_kv_cache")
                self.poisoned = False
            self._verdict = (self._serial + 1, asyncio.get_running_loop().create_future())
            await self.note(version)  # before the workers load: when that fails halfway, nobody knows what they sample from
            await reload(self.llm)
            if mode == "keep":  # running requests hold blocks, so the cache cannot be cleared; what comes now does not find them
                self.asking.salt += 1
                await start_over()
        finally:
            await core.resume_scheduler_async()
        return time.perf_counter() - began

    def judge(self, matched: bool) -> None:
        """Whether the last load is complete and its probe matched."""
        if self._verdict is not None and not self._verdict[1].done():
            self._verdict[1].set_result(matched)
            if not matched:
                self._wrong.add(self._verdict[0])

    async def wrong_since(self, completion: Any) -> int | None:
        """The load from which on this output's tokens may not be given out; None when all may."""
        for span in completion.weight_versions or ():
            if not await self.good(span.version):
                return serial_of(span.version)
        return None

    async def good(self, noted: str) -> bool:
        """Whether tokens of the load with this label may be given out, once that is known."""
        serial = serial_of(noted)
        if self._verdict is not None and serial == self._verdict[0]:
            return await asyncio.shield(self._verdict[1])
        return serial not in self._wrong


async def reload(llm: Any) -> None:
    """All workers load what stands in the shared memory."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest({}))
    await llm.finish_weight_update()
