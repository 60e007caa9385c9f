"""A double of the SGLang server: its documented HTTP API, with a real model behind it.

Paths, fields and answers are those of SGLang's documentation and of its release 0.5.23; a field
that stands in neither is refused, so that an engine cannot pass by asking for what does not exist.
What matters of its behaviour is here, too: a pause is one, requests go on through it with the KV
that they have, and while it lasts none comes back, aborted or not; the last token that old weights
sampled bears the new version (see ``sglang_wire.late``); the prefix cache keeps what was read by
older weights unless it is flushed, and a flush is refused while requests run. Run as a program it
listens at ``--port``.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from aiohttp import web
from sglang_updater import WeightUpdater
from sglang_wire import FIELDS, SAMPLING, SHIFT, late, load_folder

from broker.contract import wire
from rollout.config import RolloutSection
from rollout.engines.base import EngineConfig, GenerationOutput
from rollout.engines.hf.engine_core import EngineCore


class Double:
    """One server.

    Args:
        spans: whether it tells the weight version of each token, as newer servers do.

    Attributes:
        calls: every path and body that came.
        true_runs: pairs (version, number of tokens) of each output, as they were sampled.
        hold: while it is there and not set, new weights are not taken.
        deaf: so many aborts of one request are not heard.
        options: the command line by name.
    """

    def __init__(self, *, spans: bool = True) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.options: dict[str, str] = {}
        self.true_runs: list[list[tuple[int, int]]] = []
        self.key = ""
        self.refuse = ""  # a path that fails
        self.hold: asyncio.Event | None = None
        self.deaf = 0
        self._most = math.inf  # tokens to sample
        self.port = 0
        self._spans = spans
        self._core: EngineCore
        self._answers: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._version = 0
        self._paused = False
        self._aborts: list[dict[str, Any]] = []  # that came in a pause
        self._changed = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._updater = WeightUpdater(lambda: self._core.model.weights())
        self._session = False
        self._loop: asyncio.Task[None] | None = None

    @property
    def command(self) -> list[str]:
        """What an engine starts in place of SGLang."""
        return [
            sys.executable,
            "-S",
            str(Path(__file__).with_name("sglang_forward.py")),
            str(self.port),
        ]

    async def stand(self, count: int) -> None:
        """Sample so many tokens more and no others until ``go``."""
        self._most = self._core.stats().generated_tokens + count
        while self._core.stats().generated_tokens < self._most:  # noqa: ASYNC110 - the core counts and tells nobody
            await asyncio.sleep(0.001)

    def go(self) -> None:
        self._most = math.inf
        self._changed.set()

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies that came to one path."""
        return [body for came, body in self.calls if came == path]

    def begin(self, arguments: list[str]) -> None:
        """Load the model, as the options say."""
        keys = Path(arguments[arguments.index("--config") + 1])
        assert keys.stat().st_mode & 0o077 == 0
        given = yaml.safe_load(keys.read_text())
        assert given.keys() == {"api-key", "admin-api-key"}
        assert given["api-key"] == given["admin-api-key"]
        self.key = given["api-key"]
        self.options = {
            name.removeprefix("--"): value
            for name, _, value in (one.partition("=") for one in arguments)
        }
        section = RolloutSection(
            max_running=int(self.options["max-running-requests"]),
            max_context_tokens=int(self.options["context-length"]),
            prefill_tokens=int(self.options["chunked-prefill-size"]),
            prefix_cache="disable-radix-cache" not in self.options,
        )
        self._version = int(self.options["weight-version"])
        self._core = EngineCore(
            EngineConfig(
                self.options["model-path"],
                section,
                self.options["dtype"],
                device="cpu",
                policy_version=self._version + SHIFT,
            )
        )
        # SGLang shares prefixes only within a name space, which is a conversation here
        self._core._prefixes = None
        self._loop = asyncio.create_task(self._step())

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/health", self._health)
        app.router.add_post("/_started", self._started)
        handlers: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/generate": self._generate, "/abort_request": self._abort, "/pause_generation": self._pause,
            "/continue_generation": self._continue, "/update_weight_version": self._relabel,
            "/update_weights_from_disk": self._from_disk, "/init_weights_update_group": self._init_group,
            "/destroy_weights_update_group": self._destroy_group,
            "/update_weights_from_distributed": self._from_distributed,
            "/release_memory_occupation": self._release, "/resume_memory_occupation": self._resume,
            "/begin_weight_update": self._begin, "/end_weight_update": self._end,
        }  # fmt: skip
        for path, handler in handlers.items():
            app.router.add_post(path, self._guarded(path, handler))
        return app

    async def close(self) -> None:
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            self._core.model.close()

    # ----------------------------------------------------------------------------------------------------
    # HTTP

    def _guarded(
        self, path: str, handler: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
    ) -> Any:
        async def handle(request: web.Request) -> web.Response:
            if request.headers.get("Authorization") != f"Bearer {self.key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
            body = await request.json()
            self.calls.append((path, body))
            unknown = body.keys() - FIELDS[path] | body.get("sampling_params", {}).keys() - SAMPLING
            if unknown or self.refuse == path:
                return web.json_response(
                    {"error": {"message": f"{sorted(unknown) or 'as told'} refused"}}, status=400
                )
            try:
                found = await handler(body)
            except ValueError as error:
                return web.json_response({"error": {"message": str(error)}}, status=400)
            if path == "/abort_request":
                return web.Response(status=200)  # without a body
            return web.json_response(found, status=400 if found.get("success") is False else 200)

        return handle

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._loop is not None else 503)

    async def _started(self, request: web.Request) -> web.Response:
        self.begin(await request.json())
        return web.Response()

    # ----------------------------------------------------------------------------------------------
    # generation

    async def _step(self) -> None:
        """The scheduler's loop: a pass, then whoever else wants the event loop."""
        while True:
            self._core.admit(time.monotonic())
            if (
                self._core.can_step
                and not self._paused
                and self._core.stats().generated_tokens < self._most
            ):
                self._core.step()
                await asyncio.sleep(0)
            else:
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.05)
            for rid, output in self._core.outbox:
                if (answer := self._answers.pop(rid, None)) is not None and not answer.done():
                    answer.set_result(output)
            self._core.outbox.clear()

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._resumed.wait()
        params, ids = body["sampling_params"], body["input_ids"]
        if len(ids) >= self._core.model.max_context:
            raise ValueError(
                f"The input ({len(ids)} tokens) is longer than the model's context length "
                f"({self._core.model.max_context} tokens)."
            )
        if body.get("return_sampling_mask") and not 1 <= params["top_k"] <= int(
            self.options["sampling-mask-max-tokens"]
        ):
            raise ValueError(
                "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= "
                "--sampling-mask-max-tokens"
            )
        if self._core.asleep:
            raise AssertionError("a request reached a server without weights")
        if params["max_new_tokens"] == 0:
            return self._scores(body)
        sampling = wire.SamplingParams(
            max_tokens=params["max_new_tokens"], temperature=params["temperature"], top_p=params["top_p"], top_k=max(0,
                params["top_k"]),
            min_p=params["min_p"], seed=params.get("sampling_seed"), stop=params.get("stop", []),
            ignore_eos=params["ignore_eos"],
            stop_token_ids=[] if params["ignore_eos"] else params.get("stop_token_ids", []),
        )  # fmt: skip
        request = wire.GenerateRequest(
            request_id=body["rid"], conversation_id=body.get("extra_key", ""), token_ids=wire.column(ids, "<i4"),
            min_version=0,
            deadline_s=3600.0, sampling=sampling,
        )  # fmt: skip
        answer = self._answers[body["rid"]] = asyncio.get_running_loop().create_future()
        self._core.submit(request, time.monotonic())
        self._changed.set()
        output = await answer
        if output.finish_reason == "error":
            raise ValueError(output.error)
        return {
            "text": "",
            "output_ids": list(output.token_ids),
            "meta_info": self._meta(body, output),
        }

    def _meta(self, body: dict[str, Any], output: GenerationOutput) -> dict[str, Any]:
        params, logprobs = body["sampling_params"], list(output.logprobs)
        greedy = params["temperature"] == 0
        fewer = params["top_p"] < 1 or params["top_k"] > 0 or params["min_p"] > 0
        # Greedy tokens have the logprob of the whole distribution there, and those of a filtered
        # one are not renormalised.
        shown = [one - 0.5 if greedy or fewer else one for one in logprobs]
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": output.finish_reason},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(logprobs),
            "cached_tokens": output.prefix_hit_tokens,
            "output_token_logprobs": [
                [shown[i], int(token), None] for i, token in enumerate(output.token_ids)
            ],
            "weight_version": str(self._version),
        }
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = logprobs
        if self._spans:
            meta["weight_versions"] = late(output)
            self.true_runs.append(
                [(version - SHIFT, count) for version, count in output.version_runs]
            )
        return meta

    def _scores(self, body: dict[str, Any]) -> dict[str, Any]:
        ids, k = body["input_ids"], body.get("top_logprobs_num", 0)
        assert body["return_logprob"]
        assert body["logprob_start_len"] == 0
        values = self._core.model.logprobs(ids).tolist()
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": 0},
            "input_token_logprobs": [
                [None, ids[0], None],
                *([value, token, None] for value, token in zip(values, ids[1:], strict=True)),
            ],
            "weight_version": str(self._version),
        }
        if k:
            scores = self._core.model.score_context(ids, k)
            best, tops = scores.top_ids, scores.top_logprobs
            rows = [
                [[float(v), int(i), None] for v, i in zip(tops[n], best[n], strict=True)]
                for n in range(len(ids) - 1)
            ]
            meta["input_top_logprobs"] = [None, *rows]
        return {"text": "", "output_ids": [], "meta_info": meta}

    async def _abort(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.deaf and not body.get("abort_all"):
            self.deaf -= 1
            return {}
        if self._paused:
            self._aborts.append(body)
            return {}
        rid = body.get("rid") or ""
        for one in list(self._answers):
            if body.get("abort_all") or (rid and one.startswith(rid)):
                self._core.abort(one)
        self._changed.set()
        return {}

    async def _pause(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("mode", "abort") != "in_place":
            raise ValueError("this double knows in_place")
        self._paused = True
        self._resumed.clear()
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def _continue(self, _: dict[str, Any]) -> dict[str, Any]:
        self._paused = False
        if self._aborts and self._core.can_step:
            self._core.step()  # aborted requests go through one more pass
        for body in self._aborts:
            await self._abort(body)
        self._aborts.clear()
        self._resumed.set()
        self._changed.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    # -------------------------------------------------------------------------------------------------
    # weights

    async def _relabel(self, body: dict[str, Any]) -> dict[str, Any]:
        self._version = int(body["new_version"])
        self._core.adopt(self._version + SHIFT)
        return {"success": True, "new_version": body["new_version"]}

    async def _from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        tensors = load_folder(Path(body["model_path"]))
        if self.hold is not None:
            await self.hold.wait()
        return await self._take(list(tensors.items()), body)

    async def _take(self, weights: Any, body: dict[str, Any]) -> dict[str, Any]:
        flush = body.get("flush_cache", True)
        if self._answers and (flush or not self._paused):
            return {
                "success": False,
                "message": "Cache flush failed: requests are running"
                if flush
                else "requests are running",
            }
        done, message = await asyncio.to_thread(
            self._updater.load_weights_from_distributed, weights
        )
        if not done:
            return {"success": False, "message": message}
        self._version = int(body["weight_version"])
        self._core._set_version(self._version + SHIFT, weights_changed=flush)
        return {"success": True, "message": message}

    async def _init_group(self, body: dict[str, Any]) -> dict[str, Any]:
        fields = (
            "master_address",
            "master_port",
            "rank_offset",
            "world_size",
            "group_name",
            "backend",
        )
        arguments = [body[name] for name in fields]
        done, message = await asyncio.to_thread(self._updater.init_weights_update_group, *arguments)
        return {"success": done, "message": message}

    async def _destroy_group(self, body: dict[str, Any]) -> dict[str, Any]:
        done, message = self._updater.destroy_weights_update_group(body["group_name"])
        return {"success": done, "message": message}

    async def _release(self, _: dict[str, Any]) -> dict[str, Any]:
        if (
            "enable-memory-saver" not in self.options
            or "enable-weights-cpu-backup" not in self.options
        ):
            raise ValueError(
                "the server was not started so that its memory can be released with the weights kept"
            )
        if self._answers:
            raise ValueError(
                "release_memory_occupation should be called only when no ongoing request."
            )
        self._core.sleep()
        return {"success": True, "message": ""}

    async def _resume(self, _: dict[str, Any]) -> dict[str, Any]:
        self._core.wake()
        return {"success": True, "message": ""}

    async def _begin(self, _: dict[str, Any]) -> dict[str, Any]:
        self._session, before = True, self._session
        return {"success": not before, "message": "a weight-update session is already open"}

    async def _end(self, _: dict[str, Any]) -> dict[str, Any]:
        self._session, before = False, self._session
        return {"success": before, "message": "no weight-update session is open"}

    async def _from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self._session:
            return {
                "success": False,
                "message": "must run between begin_weight_update() and end_weight_update()",
            }
        fields = ("names", "dtypes", "shapes", "group_name")
        arguments = {name: body[name] for name in fields}
        weights = await asyncio.to_thread(
            partial(self._updater.receive_weights_from_distributed, **arguments)
        )
        return await self._take(weights, body)


@asynccontextmanager
async def double(**settings: Any) -> AsyncIterator[Double]:
    """A double in this process; its ``command`` starts the child that leads to it."""
    made = Double(**settings)
    runner = web.AppRunner(made.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = runner.addresses[0][1]
    try:
        yield made
    finally:
        await made.close()
        await runner.cleanup()


async def serve(arguments: list[str]) -> None:
    made = Double()
    runner = web.AppRunner(made.app())
    await runner.setup()
    made.begin(arguments)
    await web.TCPSite(runner, "127.0.0.1", int(made.options["port"])).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(sys.argv[1:]))
