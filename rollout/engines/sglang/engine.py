"""The engine ``sglang``: runs an SGLang server as a child process and uses its HTTP API.

Tested against a fake of that API with a real model behind it, not yet against a real SGLang.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from broker.errors import ConfigError, TransferFailed, UserError
from broker.weights.carriers.selection import worker_carriers
from broker.weights.probe import check_probe
from rlearner_text.config import check_model_path
from rlearner_text.hub import model_folder
from rollout.engines.base import (
    EngineConfig,
    EngineStats,
    GenerationOutput,
    UpdateMode,
    request_problem,
)
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.client import (
    GenerateLeg,
    SGLangClient,
    SGLangRequestError,
    generate_body,
    read_leg,
    read_scores,
)
from rollout.engines.sglang.request_queue import (
    ABORT_AGAIN_S,
    RETURN_WITHIN_S,
    SCORE_TIMEOUT_S,
    SGLangRequestQueue,
)
from rollout.engines.sglang.server_process import (
    HOST,
    SGLangProcess,
    data_parallel_copies,
    free_port,
    launch_command,
    server_options,
)
from rollout.engines.update_check import check_fit, materialized

if TYPE_CHECKING:
    import torch

    from rlearner_text.stored_form import View
    from rollout.engines.sglang.weight_senders import SGLangWeightSender
    from rollout.engines.sglang.worker_transfer import WorkerTransferSender

log = logging.getLogger(__name__)


class Send(Protocol):
    """Has the server load a version: ``SGLangWeightSender.send`` with everything but ``flush``."""

    async def __call__(self, *, flush: bool) -> None: ...


class SGLangEngine:
    """See ``rollout.engines.base.Engine``.

    Requests are queued here, longest first, and as many run in the server as fit. For new weights:

    - ``keep``: the server pauses with its requests in place, loads, and continues. Requires a
      server that returns the version of each token; otherwise this is ``recompute``.
    - ``recompute``: requests return, the weights are loaded, and requests are sent again with their
      output so far.
    - ``abort``: the same, but requests are not sent again.

    Later requests never reuse KV of older weights: each set of weights has its own namespace of the
    prefix cache.
    """

    has_weights = True

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._args = SGLangArgs.model_validate(config.section.engine_args)
        self._requests = SGLangRequestQueue(config, self._spawn)
        self._spans = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None
        self._child: SGLangProcess | None = None
        self._api: SGLangClient | None = None
        self._sender: SGLangWeightSender | None = None
        self._workers: WorkerTransferSender | None = None
        self._num_workers = 0  # that can receive weights themselves
        self._views: dict[str, list[View]] = {}  # of the weights, by the names that SGLang loads
        self._held: dict[str, torch.Tensor] = {}
        self._vocab_size = 0

    @property
    def policy_version(self) -> int:
        return self._requests.scheduler.version

    # ------------------------------------------------------------------------------------------
    # start and end

    async def start(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        config = self._config
        section = self._config.section
        command = launch_command(self._args)
        from rlearner_text.stored_form import stored_views
        from rollout.engines.hf.engine_core import find_tokenizer  # these import torch
        from rollout.engines.sglang.weight_senders import make_sender, meta_tensors

        self._requests.tokenizer = await asyncio.to_thread(find_tokenizer, config)
        path = config.model_path
        trusted = config.trust_remote_code
        if config.has_weights:
            await asyncio.to_thread(check_model_path, path)
        folder = await asyncio.to_thread(model_folder, path, trust_remote_code=trusted)
        self._held, model = await asyncio.to_thread(
            meta_tensors, folder, config.dtype, trust_remote_code=trusted
        )
        self._views = stored_views(model, self._held)
        if self._views and section.weights_into == "workers":
            reason = f"the workers of SGLang receive {next(iter(self._views))} under its name here, not its file's"
            raise ConfigError(
                "rollout.weights_into", "workers", f"auto or server with this model: {reason}"
            )
        text = model.config.get_text_config()
        self._vocab_size = int(text.vocab_size)
        positions = getattr(text, "max_position_embeddings", None)
        if positions is not None and section.max_context_tokens > positions:
            allowed = (
                f"{section.max_context_tokens} is not allowed; the model has {positions} positions"
            )
            raise UserError(f"rollout.max_context_tokens: {allowed}")
        num_copies = data_parallel_copies(
            self._args, config.device, os.environ, int(text.num_attention_heads)
        )
        port = free_port()
        arguments = server_options(
            folder, section, self._args, port=port, dtype=config.dtype, device=config.device,
            version=config.policy_version,
            copies=num_copies, trust_remote_code=config.trust_remote_code, has_weights=config.has_weights,
            shares_device=config.shares_device,
        )  # fmt: skip
        self._child = SGLangProcess([*command, *arguments], self._died)
        log.info(
            "SGLang started with pid %d at port %d, log in %s",
            self._child.pid,
            port,
            self._child.log_path,
        )
        self._api = self._requests.api = SGLangClient(f"http://{HOST}:{port}", self._child.key)
        self._sender = make_sender(self._api, self._args, config.model_path)
        try:
            await self._child.ready(self._api.healthy, self._args.start_timeout_s)
            self._spans = (await self._first()).spans
            await self._find_workers(num_copies)
        except BaseException:
            self._child.keep_log = True
            await self.close()
            raise
        if not self._spans and section.update_mode == "keep":
            reason = "this SGLang does not return the weight version of each token"
            log.warning("%s: new weights recompute the KV of running requests", reason)
        self._requests.open.set()

    async def _find_workers(self, num_copies: int) -> None:
        """Find out whether SGLang's workers can receive weights themselves.

        Raises:
            UserError: if they cannot, and are told to.
        """
        from rollout.engines.sglang.worker_transfer import WorkerTransferSender, num_workers

        into = self._config.section.weights_into
        if into == "server" or (into == "auto" and self._config.device == "cpu"):
            return
        count = num_workers(self._args, num_copies, into)
        assert self._api is not None
        self._workers = WorkerTransferSender(self._api, self._args)
        if count and not await self._workers.has_plugin():
            lacks = "SGLang has not loaded this package's plugin: install rlearner in its environment, too"
            if into == "workers":
                raise UserError(f"rollout.weights_into: workers is not possible; {lacks}")
            log.warning(
                "%s, for its workers to receive weights; until then they come through this process",
                lacks,
            )
            return
        self._num_workers = count

    async def join(self) -> None:
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        self._requests.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._sender is not None:
            await self._sender.close()
        if self._api is not None:
            await self._api.close()
        if self._child is not None:
            child = self._child
            self._child = None
            await asyncio.to_thread(child.stop)

    def _died(self, reason: str) -> None:
        """Fail the engine: the child exited unexpectedly."""
        if self._ended is not None and not self._ended.done() and self._child is not None:
            self._child.keep_log = True
            self._ended.set_exception(RuntimeError(f"SGLang ended: {reason}"))
            self._ended.exception()  # mark as retrieved: join raises it again
        self._requests.fail(f"the engine stopped: SGLang ended: {reason}")

    async def _first(self) -> GenerateLeg:
        """Sample one token, to check that the server works and what it returns.

        Raises:
            UserError: if it does not work.
        """
        assert self._api is not None
        sampling = wire.SamplingParams(max_tokens=1, ignore_eos=True)
        body = generate_body(uuid.uuid4().hex, [0], sampling, 1, "first")
        try:
            return read_leg(
                await self._api.post("/generate", body, self._args.start_timeout_s), sampling
            )
        except (SGLangRequestError, ConnectionError) as error:
            raise UserError(f"SGLang started, but cannot be used: {error}") from None

    # ------------------------------------------------------------------------------------------------
    # requests

    async def generate(self, request: wire.GenerateRequest) -> GenerationOutput:
        self._check_alive()
        most = self._config.section.max_context_tokens
        reason = request_problem(request, max_context_tokens=most, vocab_size=self._vocab_size)
        if not reason and request.request_id in self._requests:
            reason = f"request_id {request.request_id!r} is already running or waiting"
        if reason:
            return self._requests.count(GenerationOutput(error=reason))
        if request.scores_context:
            return self._requests.count(await self._requests.score(request))
        return await self._requests.run(request)

    def abort(self, request_id: str) -> None:
        self._requests.abort(request_id)

    # -------------------------------------------------------------------------------------------------
    # weights

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return meta tensors with names, shapes and dtypes: the values are in the server's memory."""
        return self._held

    async def logprobs(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        self._check_alive()
        if len(token_ids) < 2:
            return np.zeros(0, np.float32)
        try:
            return read_scores(await self._requests.ask_scores(token_ids, 0), len(token_ids))
        except (SGLangRequestError, ConnectionError) as error:
            raise RuntimeError(str(error)) from None

    async def adopt(self, version: int) -> None:
        """See ``Engine.adopt``; tokens in flight count for the version that the server had when it
        sampled them.
        """
        assert self._api is not None
        async with self._requests.updating:
            try:
                body = {"new_version": str(version), "abort_all_requests": False}
                await self._api.post("/update_weight_version", body, SCORE_TIMEOUT_S)
            except (SGLangRequestError, ConnectionError) as error:
                raise TransferFailed(str(error)) from None
            self._requests.serve(version, changed=False)

    async def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
    ) -> float:
        self._check_alive()
        from rlearner_text.stored_form import as_stored

        check_fit(self._held, tensors)
        tensors = dict(
            as_stored((await asyncio.to_thread(materialized, tensors)).items(), self._views)
        )
        assert self._sender is not None
        async with self._requests.updating:
            await self._sender.prepare(tensors)
            return await self._load(
                partial(self._sender.send, tensors, version), version, mode, probe
            )

    def worker_carriers(self) -> dict[wire.Carrier, int]:
        into = self._config.section.weights_into
        on_gpu = self._config.device != "cpu"
        # they load what arrives under the learner's names
        able = self._num_workers and not self._views
        return worker_carriers(into, self._num_workers, on_gpu=on_gpu) if able else {}

    async def receive_weights(
        self,
        transfer: str,
        version: int,
        mode: UpdateMode,
        probe: wire.Probe | None,
        go: Callable[[], Awaitable[None]],
    ) -> tuple[float, str]:
        self._check_alive()
        assert self._workers is not None
        async with self._requests.updating:
            await self._workers.begin(transfer)
            try:
                await go()
            except BaseException:
                await self._workers.cancel()
                raise
            paused_s = await self._load(
                partial(self._workers.send, {}, version), version, mode, probe
            )
            return paused_s, self._workers.digest

    async def _load(
        self, send: Send, version: int, mode: UpdateMode, probe: wire.Probe | None
    ) -> float:
        """Load a version that is ready to be sent, and serve it; return the seconds of pause."""
        began = time.monotonic()
        self._requests.open.clear()
        try:
            if mode == "keep" and self._spans:
                await self._load_in_place(send, version, probe)
            else:
                await self._load_quiet(send, mode, probe)
        except BaseException as error:
            self._requests.stall()
            if isinstance(error, (SGLangRequestError, ConnectionError)):
                raise TransferFailed(str(error)) from None
            raise
        self._requests.serve(version, changed=True)
        self._requests.pause_s += time.monotonic() - began
        return time.monotonic() - began

    async def _load_quiet(self, send: Send, mode: UpdateMode, probe: wire.Probe | None) -> None:
        """Load with no request in the server: running ones have returned their partial output."""
        if mode == "abort":
            self._requests.abort_running()
        await self._quiet()
        await send(flush=True)
        self._requests.loads += 1
        await self._probe(probe)

    async def _load_in_place(self, send: Send, version: int, probe: wire.Probe | None) -> None:
        """Load with requests paused. They resume before the probe; if it fails, tokens of this
        version are dropped.
        """
        assert self._api is not None
        try:
            await self._api.post("/pause_generation", {"mode": "in_place"}, SCORE_TIMEOUT_S)
            await send(flush=False)
        except BaseException:
            await self._take_back(version)
            raise
        finally:
            self._requests.loads += 1
            with contextlib.suppress(ConnectionError, SGLangRequestError):
                await self._api.post(
                    "/continue_generation", {"torch_empty_cache": False}, SCORE_TIMEOUT_S
                )
        try:
            await self._probe(probe)
        except BaseException:
            await self._take_back(version, older=False)
            raise

    async def _take_back(self, version: int, *, older: bool = True) -> None:
        """Abort the requests in the server; drop tokens of the new version, and of the old if
        indistinguishable.
        """
        assert self._api is not None
        forbidden = {version, self.policy_version} if older else {version}
        for running in self._requests.sent():
            running.forbidden = frozenset(forbidden)
        await self._api.abort("")

    async def _probe(self, probe: wire.Probe | None) -> None:
        if probe is None:
            return
        try:
            check_probe(probe, await self.logprobs(probe.token_ids.array().tolist()))
        except RuntimeError as error:
            raise TransferFailed(f"the probe could not be computed: {error}") from None

    async def _quiet(self) -> None:
        """Wait until no request is in the server.

        Raises:
            TransferFailed: if the server does not return them.
        """
        assert self._api is not None
        try:
            async with asyncio.timeout(RETURN_WITHIN_S):
                while requests := list(self._requests.sent()):
                    await self._api.abort("")
                    for running in requests:
                        running.quiet.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ABORT_AGAIN_S):
                            for running in requests:
                                if running.rid:
                                    await running.quiet.wait()
        except TimeoutError:
            raise TransferFailed(
                f"SGLang did not return the aborted requests within {RETURN_WITHIN_S:g} s"
            ) from None

    async def sleep(self) -> None:
        """See ``SleepingEngine``: requests return from the server and are sent again with their
        output so far.
        """
        assert self._api is not None
        await self._requests.updating.acquire()
        self._requests.open.clear()
        try:
            await self._quiet()
            await self._api.post("/release_memory_occupation", {}, self._args.update_timeout_s)
        except (SGLangRequestError, ConnectionError, TransferFailed) as error:
            raise RuntimeError(f"SGLang does not free its memory: {error}") from None

    async def wake(self) -> None:
        assert self._api is not None
        try:
            await self._api.post("/resume_memory_occupation", {}, self._args.update_timeout_s)
        except (SGLangRequestError, ConnectionError) as error:
            raise RuntimeError(f"SGLang does not take its memory back: {error}") from None
        self._requests.loads += 1  # the server has dropped its KV
        self._requests.resume()
        self._requests.updating.release()

    # ---------------------------------------------------------------------------------------------------
    # stats

    def stats(self) -> EngineStats:
        return self._requests.stats()

    @property
    def _closed(self) -> bool:
        return self._ended is None or self._ended.done()

    def _check_alive(self) -> None:
        if self._closed:
            raise RuntimeError("the engine has stopped")

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
