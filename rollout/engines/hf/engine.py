"""The engine ``hf``: continuous batching of a transformers causal language model in a separate
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from broker.contract import wire
from broker.telemetry.operator_profile import StepProfiler
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rollout.engines.base import NO_VERSION, EngineConfig, EngineStats, GenerationOutput, UpdateMode
from rollout.engines.hf.engine_core import EngineCore
from rollout.engines.hf.logit_offsets import is_reshaped
from rollout.engines.hf.malloc_settings import keep_freed_memory
from rollout.engines.update_check import materialized

T = TypeVar("T")
Command = Callable[[EngineCore], None]


class HFEngine:
    """See ``rollout.engines.base.Engine``.

    The thread owns model, slots and queue. Commands reach it through one queue and run between two
    passes; all outputs of a pass return to the event loop in one call.
    """

    has_weights = True
    tells_top = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._taps: dict[str, TokenListener] = {}
        self._preparing: set[str] = set()  # requests whose grammars are being compiled
        self._core: EngineCore | None = None
        self._profiler = StepProfiler(config.profile)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._ended: asyncio.Future[None]

    @property
    def keeps_tensors(self) -> bool:
        return self._core is None or not self._core.model.copies_weights

    @property
    def policy_version(self) -> int:
        return self._core.version if self._core is not None else NO_VERSION

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        ready: asyncio.Future[EngineCore] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        try:
            self._core = await ready
        except BaseException:
            await self.close()
            raise

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        if self._ended.done():
            raise RuntimeError("the engine has stopped")
        if request.request_id in self._waiting:
            return GenerationOutput(
                error=f"request_id {request.request_id!r} is already running or waiting"
            )
        if request.scores_context:
            return await self._call(lambda core: core.score(request))
        future: asyncio.Future[GenerationOutput] = self._loop.create_future()
        self._waiting[request.request_id] = future
        now = time.monotonic()
        if tap is not None:
            self._taps[request.request_id] = tap
        try:
            reshaping = None
            if is_reshaped(request.sampling):
                self._preparing.add(request.request_id)
                reshaping = await asyncio.to_thread(self._running_core().reshape, request.sampling)
                if request.request_id not in self._preparing:
                    return GenerationOutput(finish_reason="abort")
            self._commands.put(
                lambda core: core.submit(
                    request, now, None if tap is None else tap.top_logprobs, reshaping
                )
            )
            return await future
        finally:
            self._taps.pop(request.request_id, None)
            self._preparing.discard(request.request_id)
            if self._waiting.pop(request.request_id, None) is not None:  # cancelled by the caller
                self.abort(request.request_id)

    def abort(self, request_id: str) -> None:
        self._preparing.discard(request_id)
        self._commands.put(lambda core: core.abort(request_id))

    async def adopt(self, version: int) -> None:
        await self._call(lambda core: core.adopt(version))

    async def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        whole = await asyncio.to_thread(materialized, tensors)  # while generation continues
        return await self._call(lambda core: core.update(whole, version, mode, probe))

    async def sleep(self) -> None:
        await self._call(lambda core: core.sleep())

    async def wake(self) -> None:
        await self._call(lambda core: core.wake())

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        logprobs = await self._call(lambda core: core.model.logprobs(token_ids))
        array: npt.NDArray[np.float32] = logprobs.numpy()
        return array

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._running_core().model.weights()

    def stats(self) -> EngineStats:
        return self._core.stats() if self._core is not None else EngineStats()

    async def join(self) -> None:
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        if self._thread is None:
            return
        self._commands.put(None)
        with contextlib.suppress(Exception):  # join and generate have raised its failure
            await self.join()
        self._thread.join()
        self._thread = None

    def _running_core(self) -> EngineCore:
        if self._core is None:
            raise RuntimeError("the engine has not started")
        return self._core

    async def _call(self, work: Callable[[EngineCore], T]) -> T:
        """Run a function on the engine's thread, between two passes."""
        if self._ended.done():
            raise RuntimeError("the engine has stopped")
        future: asyncio.Future[T] = self._loop.create_future()

        def command(core: EngineCore) -> None:
            if future.cancelled():  # by the caller
                return
            try:
                result = work(core)
            except Exception as error:  # noqa: BLE001 - raised again in the caller
                self._post(_fail, future, error)
            else:
                self._post(_succeed, future, result)

        self._commands.put(command)
        return await future

    # ------------------------------------------------------------------------------------- the
    # engine's thread

    def _run(self, ready: asyncio.Future[EngineCore]) -> None:
        if self._config.section.num_threads:
            torch.set_num_threads(self._config.section.num_threads)
        try:
            keep_freed_memory()
            core = EngineCore(self._config)
        except Exception as error:  # noqa: BLE001 - raised again by start()
            self._post(_fail, ready, error)
            self._post(_succeed, self._ended, None)
            return
        self._post(_succeed, ready, core)
        try:
            while self._turn(core):
                pass
        except Exception as error:  # noqa: BLE001 - raised again by join() and every request
            self._post(self._end, error)
        else:
            self._post(self._end, None)
        finally:
            self._profiler.close()
            core.model.close()

    def _turn(self, core: EngineCore) -> bool:
        """Admit, run one pass, send outputs, run commands; sleep without work. Return False once
        closed.
        """
        core.admit(time.monotonic())
        if core.can_step:
            with self._profiler.record(core.version + 1):
                core.step()
        if core.told:
            events = core.told
            core.told = []
            self._post(self._tell, events)
        if core.outbox:
            outputs = core.outbox
            core.outbox = []
            self._post(self._deliver, outputs)
        elif not core.can_step:  # only a command or a deadline can change anything
            with contextlib.suppress(queue.Empty):
                if not self._obey(core, self._commands.get(timeout=self._patience(core))):
                    return False
        with contextlib.suppress(queue.Empty):
            while self._obey(core, self._commands.get_nowait()):
                pass
            return False
        return True

    def _obey(self, core: EngineCore, command: Command | None) -> bool:
        if command is not None:
            command(core)
        return command is not None

    def _patience(self, core: EngineCore) -> float | None:
        due_at = core.scheduler.next_deadline()
        return None if due_at is None else max(0.0, due_at - time.monotonic())

    def _post(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    # --------------------------------------------------------------------------------------- the
    # event loop

    def _tell(self, events: list[tuple[str, TokenEvent]]) -> None:
        for request_id, piece in events:
            tap = self._taps.get(request_id)
            if tap is not None:
                tap.on_tokens(piece)

    def _deliver(self, outputs: list[tuple[str, GenerationOutput]]) -> None:
        for request_id, output in outputs:
            future = self._waiting.pop(request_id, None)
            if future is not None and not future.done():
                future.set_result(output)

    def _end(self, error: Exception | None) -> None:
        for future in self._waiting.values():
            _fail(
                future,
                RuntimeError(f"the engine stopped: {error}" if error else "the engine was closed"),
            )
        self._waiting.clear()
        if error is None:
            _succeed(self._ended, None)
        else:
            _fail(self._ended, error)
            self._ended.exception()  # mark as retrieved: join raises it again


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
