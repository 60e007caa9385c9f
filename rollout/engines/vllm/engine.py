"""The engine ``vllm``: AsyncLLM in this process, with the model in vLLM's own processes.

Requests wait here, not in vLLM (``requests``). vLLM records the weight load of each token. New
weights are written into shared memory while generation continues (``store``); it pauses only while
the workers load them (``loading``). Or the workers receive them from the learner themselves, and it
pauses for most of the transfer. In either case their probe runs alongside the requests in flight:
their new tokens are released once it matches, and dropped if it does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights.carriers.selection import worker_carriers
from broker.weights.probe import check_probe
from rlearner_text.openai.token_events import TokenListener
from rollout.engines.base import (
    NO_VERSION,
    EngineConfig,
    EngineStats,
    GenerationOutput,
    UpdateMode,
    request_problem,
)
from rollout.engines.context_scores import ContextScores
from rollout.engines.hf.logit_offsets import offsets_problem as reshaping_problem
from rollout.engines.update_check import check_fit
from rollout.engines.vllm.conversion import NOT_FINITE, context_logprobs, top_rows
from rollout.engines.vllm.llm_client import first_line
from rollout.engines.vllm.request_queue import VLLMRequestQueue, fail_future
from rollout.engines.vllm.startup import check_installed, open_llm
from rollout.engines.vllm.weight_loader import VLLMWeightLoader

if TYPE_CHECKING:
    import torch

WATCH_S: Final = 1.0  # interval of checks that vLLM's processes are alive


class VLLMEngine:
    """See ``rollout.engines.base.Engine``."""

    has_weights = True
    tells_top = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._requests = VLLMRequestQueue(config, self._spawn)
        self._loading: VLLMWeightLoader | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()
        self._ended: asyncio.Future[None]
        self._closed = False

    @property
    def policy_version(self) -> int:
        return self._requests.scheduler.version

    async def start(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        check_installed()
        loading = self._loading = VLLMWeightLoader(await asyncio.to_thread(open_llm, self._config))
        try:
            self._requests.open(loading)
            loading.llm._run_output_handler()
            await loading.prove(self._config)
            await loading.note(self.policy_version)
        except BaseException:
            await self.close()
            raise
        self._spawn(self._watch(loading.llm))

    async def generate(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None
    ) -> GenerationOutput:
        if self._closed or self._ended.done():
            raise RuntimeError("the engine has stopped")
        opened = self._open().opened
        if request.request_id in self._requests:
            return GenerationOutput(
                error=f"request_id {request.request_id!r} is already running or waiting"
            )
        most = self._config.section.max_context_tokens
        reason = request_problem(request, max_context_tokens=most, vocab_size=opened.vocab_size)
        if not reason and request.sampling.stop and opened.tokenizer is None:
            reason = "stop strings need a tokenizer, and the model's folder has none"
        reason = reason or reshaping_problem(request.sampling, opened.vocab_size, opened.tokenizer)
        if reason:
            return self._requests.count(GenerationOutput(error=reason))
        if request.scores_context:
            return self._requests.count(await self._score(request))
        return await self._requests.run(request, tap)

    def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    async def adopt(self, version: int) -> None:
        async with self._changing:
            await self._open().note(version)
            self._requests.serve(version)

    async def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        shared = self._open().opened.shared
        check_fit(shared.tensors, tensors)
        async with self._changing:
            await asyncio.to_thread(shared.fill, tensors)  # while generation continues
            return await self._load(version, mode, probe)

    def worker_carriers(self) -> dict[wire.Carrier, int]:
        loading = self._open()
        into = self._config.section.weights_into
        parallel = loading.llm.vllm_config.parallel_config
        num_workers = parallel.world_size * parallel.data_parallel_size
        from vllm.platforms import current_platform

        on_gpu = not current_platform.is_cpu()
        return worker_carriers(into, num_workers, on_gpu=on_gpu)

    async def receive_weights(
        self,
        transfer: str,
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
        go: Callable[[], Awaitable[None]],
    ) -> tuple[float, str]:
        llm = self._open().llm
        async with self._changing:
            try:
                await llm.collective_rpc("begin_transfer", args=(transfer,))
                await go()
            except BaseException as error:
                await llm.collective_rpc("cancel_transfer", args=(first_line(error),))
                raise
            paused_s = await self._load(version, mode, probe, received=True)
            # each is the learner's
            digests: list[str] = await llm.collective_rpc("received_digest")
            return paused_s, digests[0]

    async def _load(
        self, version: int, mode: UpdateMode, probe: wire.Probe | None, *, received: bool = False
    ) -> float:
        """Load new weights into the workers, check the probe, and serve them; return the seconds of
        pause.
        """
        loading = self._open()
        self._requests.held = True
        try:
            paused_s = await loading.load(
                version, mode, self._requests.start_over, received=received
            )
            self._requests.pause_s += paused_s
            if probe is not None:
                check_probe(probe, await self.logprobs(probe.token_ids.array().tolist()))
        except BaseException as error:
            # the workers' weights are unknown: hold requests until an update succeeds,
            loading.judge(False)
            self._requests.stall(NO_VERSION)  # and end those in flight with their valid tokens
            if isinstance(error, (TransferFailed, asyncio.CancelledError)) or not isinstance(
                error, Exception
            ):
                raise
            reason = " ".join(str(error).split())[:400]
            raise TransferFailed(f"vLLM could not load version {version}: {reason}") from error
        finally:
            self._requests.held = False
        loading.judge(True)
        self._requests.serve(version)
        return paused_s

    async def sleep(self) -> None:
        """See ``SleepingEngine``: vLLM keeps a copy of the weights in host memory and preempts what
        runs.
        """
        await self._changing.acquire()
        self._requests.held = True
        await self._open().llm.sleep(level=1, mode="keep")

    async def wake(self) -> None:
        await self._open().llm.wake_up()
        self._requests.resume()
        self._changing.release()

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        return await self._open().asking.logprobs(token_ids)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self._open().opened.shared.tensors

    def stats(self) -> EngineStats:
        return self._requests.stats()

    async def join(self) -> None:
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._requests.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            loading = self._loading
            self._loading = None
            if loading is not None:
                await asyncio.to_thread(loading.opened.close)
        if not self._ended.done():
            self._ended.set_result(None)

    async def _score(self, request: wire.GenerateRequest) -> GenerationOutput:
        """Score a context."""
        if self.policy_version < max(request.min_version, 0):
            return GenerationOutput(
                error=f"no weights of version {request.min_version} or later to score with"
            )
        tokens = request.token_ids.array().tolist()
        rows = await self._open().asking.context_rows(tokens, request.prompt_top_k)
        scores = ContextScores(
            context_logprobs(tokens, rows), *top_rows(rows, request.prompt_top_k)
        )
        return (
            scores.output_for(request) if scores.is_finite else GenerationOutput(error=NOT_FINITE)
        )

    def _open(self) -> VLLMWeightLoader:
        if self._loading is None:
            raise RuntimeError("the engine has not started")
        return self._loading

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, llm: Any) -> None:
        """Fail the engine when vLLM's processes exit."""
        while not llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(WATCH_S)
        error = RuntimeError("vLLM's process exited; see its last lines above")
        self._requests.fail(RuntimeError(f"the engine stopped: {error}"))
        fail_future(self._ended, error)
