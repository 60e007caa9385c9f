"""Has SGLang's workers receive a transfer of the learner themselves, by
``rollout.engines.sglang.plugin``.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.errors import ConfigError, TransferFailed
from broker.system.private_files import private_write
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.client import SGLangClient, SGLangRequestError
from rollout.engines.sglang.plugin import DIGEST, GROUP, HERE

if TYPE_CHECKING:
    import torch

BEGIN_WITHIN_S = 30.0
PIPELINE_FLAGS = ("pp-size", "pipeline-parallel-size")


class WorkerTransferSender:
    """Sends nothing itself: see ``SGLangWeightSender`` for the methods that the engine calls while
    nothing runs.

    Attributes:
        digest: of the bytes that the workers have loaded last.
    """

    def __init__(self, api: SGLangClient, args: SGLangArgs) -> None:
        self._api = api
        self._args = args
        self.digest = ""

    async def has_plugin(self) -> bool:
        """Return whether SGLang has loaded the plugin."""
        try:
            reply = await self._api.post(
                "/destroy_weights_update_group", {"group_name": GROUP}, BEGIN_WITHIN_S
            )
        except (SGLangRequestError, ConnectionError):
            return False
        return HERE in str(reply.get("message"))

    async def begin(self, transfer: str) -> None:
        """Start to receive; generation continues.

        Raises:
            TransferFailed: if it did not begin.
        """
        # a private file: it holds a key
        with tempfile.TemporaryDirectory(prefix="rlearner-transfer-") as folder:
            file = Path(folder) / "transfer.json"
            await asyncio.to_thread(private_write, file, transfer.encode())
            body: dict[str, Any] = {"master_address": str(file), "master_port": 0, "rank_offset": 0}
            body |= {
                "world_size": self._args.tensor_parallel,
                "group_name": GROUP,
                "backend": "gloo",
            }
            try:
                await self._api.post("/init_weights_update_group", body, BEGIN_WITHIN_S)
            except (SGLangRequestError, ConnectionError) as error:
                raise TransferFailed(str(error)) from None

    async def cancel(self) -> None:
        """Cancel the transfer that was begun."""
        await self.has_plugin()

    async def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: the workers receive."""

    async def send(self, tensors: Mapping[str, torch.Tensor], version: int, *, flush: bool) -> None:
        """Have the workers load what they receive.

        Raises:
            TransferFailed: if one did not; the weights are then unknown.
        """
        limit = self._args.update_timeout_s
        body: dict[str, Any] = {"names": [], "dtypes": [], "shapes": [], "group_name": GROUP}
        body |= {"flush_cache": flush, "weight_version": str(version)}
        try:
            await self._api.post("/begin_weight_update", {}, limit)
            try:
                reply = await self._api.post("/update_weights_from_distributed", body, limit)
            finally:
                await self._api.post("/end_weight_update", {}, limit)
        except (SGLangRequestError, ConnectionError) as error:
            await self.cancel()
            raise TransferFailed(
                f"SGLang did not load the weights: {str(error).splitlines()[0]}"
            ) from None
        match = re.search(rf"{DIGEST}(\S+)", str(reply.get("message")))
        if match is None:
            raise TransferFailed("SGLang did not say which bytes its workers have received")
        self.digest = match[1]

    async def close(self) -> None: ...


def num_workers(args: SGLangArgs, num_copies: int, into: str) -> int:
    """Return how many workers can receive, 0 if SGLang's layout has no group of all of them.

    Raises:
        ConfigError: if ``rollout.weights_into`` says that they do.
    """
    pipelines = [name for name in PIPELINE_FLAGS if args.flags.get(name, 1) != 1]
    if num_copies == 1 and not pipelines:
        return args.tensor_parallel
    if into == "workers":
        reason = (
            f"{num_copies} copies of the model"
            if num_copies > 1
            else f"engine_args.flags.{pipelines[0]}"
        )
        raise ConfigError(
            "rollout.weights_into",
            into,
            f"auto or server with {reason}: SGLang's update group holds one",
        )
    return 0
