"""Sends new weights to an SGLang server: as a file in memory, or through a gloo process group.

Broadcasts between GPUs cannot be used: the rollout server has no GPU but those that SGLang uses,
and each member of a broadcast needs its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore
from torch.distributed.rendezvous import rendezvous

from broker.errors import TransferFailed, UserError
from rlearner_text.hub import stored_names
from rlearner_text.stored_form import use_conversions
from rlearner_text.transformers_import import import_transformers
from rollout.engines.hf.weights import HeldWeights
from rollout.engines.sglang.args import SGLangArgs
from rollout.engines.sglang.client import SGLangClient, SGLangRequestError
from rollout.engines.sglang.server_process import HOST, free_port

SHM: Final = "/dev/shm"
PREFIX: Final = "rlearner-weights-"
LEAVE_WITHIN_S: Final = 5.0
BUCKET_BYTES: Final = 512 << 20  # per announcement and broadcast


class SGLangWeightSender(Protocol):
    """Transfers one set of tensors to the server."""

    async def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do all work that is possible while requests run."""
        ...

    async def send(self, tensors: Mapping[str, torch.Tensor], version: int, *, flush: bool) -> None:
        """Load the tensors; no request may run, unless all are paused.

        Raises:
            TransferFailed: if the server did not load them; its weights are then unknown.
        """
        ...

    async def close(self) -> None: ...


def make_sender(api: SGLangClient, args: SGLangArgs, model_path: str) -> SGLangWeightSender:
    """Return the sender that ``engine_args.weights`` selects."""
    return (
        BroadcastSender(api, args)
        if args.weights == "distributed"
        else DiskSender(api, args, model_path)
    )


class DiskSender:
    """Writes a safetensors file, in memory if it fits, of which every worker of the server reads
    its part.
    """

    def __init__(self, api: SGLangClient, args: SGLangArgs, model_path: str) -> None:
        self._api = api
        self._args = args
        self._model_path = model_path
        self._folder: Path | None = None
        remove_stale_folders(Path(args.weights_dir or SHM))

    async def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the file.

        Raises:
            TransferFailed: if the file cannot be written.
        """
        await self.close()  # removes the file of an update that was never loaded
        await asyncio.to_thread(self._write, tensors)

    async def send(self, tensors: Mapping[str, torch.Tensor], version: int, *, flush: bool) -> None:
        body: dict[str, Any] = {"model_path": str(self._folder), "weight_version": str(version)}
        body |= {"flush_cache": flush, "abort_all_requests": False}
        try:
            await self._api.post("/update_weights_from_disk", body, self._args.update_timeout_s)
        except (SGLangRequestError, ConnectionError) as error:
            raise TransferFailed(str(error)) from None
        finally:
            await self.close()

    async def close(self) -> None:
        folder = self._folder
        self._folder = None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, True)

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        try:
            parent = weights_file_parent(self._args.weights_dir, size)
            self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            for name in ("config.json", "generation_config.json"):
                if (file := Path(self._model_path).expanduser() / name).is_file():
                    shutil.copyfile(file, self._folder / name)
            tensors_to_write = {
                name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()
            }
            save_file(
                tensors_to_write, self._folder / "model.safetensors", metadata={"format": "pt"}
            )
        except (OSError, SafetensorError) as error:  # a full disk raises either
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None
            raise TransferFailed(
                f"the weights cannot be written for SGLang to read: {error}"
            ) from None


def remove_stale_folders(folder: Path) -> None:
    """Remove the files of processes that were killed during an update: they use memory."""
    for leftover in folder.glob(f"{PREFIX}*"):
        pid = leftover.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(leftover, ignore_errors=True)


def weights_file_parent(configured: str | None, size_bytes: int) -> str | None:
    """Return the folder of the file: the configured one, else memory if it fits, else None for the
    temporary folder.
    """
    if configured is not None:
        return configured
    try:
        return (
            SHM
            if shutil.disk_usage(SHM).free > size_bytes * 5 // 4 and os.access(SHM, os.W_OK)
            else None
        )
    except OSError:
        return None


class BroadcastSender:
    """Broadcasts the tensors over loopback as rank 0 of SGLang's own weight update group."""

    def __init__(self, api: SGLangClient, args: SGLangArgs) -> None:
        self._api = api
        self._args = args
        self._group: Any = None
        self._name = ""
        self._made = 0

    async def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Create the group if there is none.

        Raises:
            TransferFailed: if the server's workers did not join.
        """
        if self._group is not None:
            return
        port = free_port()
        size = 1 + self._args.tensor_parallel
        self._made += 1
        # neither side can create two groups of one name
        self._name = f"rlearner_{os.getpid()}_{self._made}"
        body = {
            "master_address": HOST, "master_port": port, "rank_offset": 1, "world_size": size,
            "group_name": self._name, "backend": "gloo",
        }  # fmt: skip
        ours = _in_thread(
            lambda: join_group(self._name, port, 0, size, self._args.update_timeout_s)
        )
        theirs = asyncio.create_task(
            self._api.post("/init_weights_update_group", body, self._args.update_timeout_s)
        )
        try:
            self._group, _ = await asyncio.gather(ours, theirs)
        except (SGLangRequestError, ConnectionError, RuntimeError) as error:
            raise TransferFailed(
                f"no group to send weights through: {str(error).splitlines()[0]}"
            ) from None
        finally:
            theirs.cancel()

    async def send(self, tensors: Mapping[str, torch.Tensor], version: int, *, flush: bool) -> None:
        parts = list(split_tensors(tensors))
        try:
            await self._api.post("/begin_weight_update", {}, self._args.update_timeout_s)
            for number, part in enumerate(parts, 1):
                body = {
                    "names": list(part),
                    "dtypes": [
                        str(tensor.dtype).removeprefix("torch.") for tensor in part.values()
                    ],
                    "shapes": [list(tensor.shape) for tensor in part.values()],
                    "group_name": self._name,
                    "flush_cache": flush and number == len(parts),
                    "weight_version": str(version),
                }
                ours = _in_thread(functools.partial(self._broadcast, part))
                limit = self._args.update_timeout_s
                theirs = asyncio.create_task(
                    self._api.post("/update_weights_from_distributed", body, limit)
                )
                try:
                    await asyncio.gather(ours, theirs)
                finally:
                    theirs.cancel()
            await self._api.post("/end_weight_update", {}, self._args.update_timeout_s)
        except BaseException as error:
            with contextlib.suppress(SGLangRequestError, ConnectionError):
                await self._api.post("/end_weight_update", {}, LEAVE_WITHIN_S)
            await self.close()  # it may hold half a broadcast; the next update creates another
            if isinstance(error, (SGLangRequestError, ConnectionError, RuntimeError)):
                raise TransferFailed(
                    f"SGLang did not load the weights: {str(error).splitlines()[0]}"
                ) from None
            raise

    async def close(self) -> None:
        group = self._group
        self._group = None
        if group is None:
            return
        with contextlib.suppress(SGLangRequestError, ConnectionError):
            await self._api.post(
                "/destroy_weights_update_group", {"group_name": self._name}, LEAVE_WITHIN_S
            )
        with contextlib.suppress(RuntimeError, ValueError):
            torch.distributed.destroy_process_group(group)

    def _broadcast(self, part: Mapping[str, torch.Tensor]) -> None:
        waiting = [
            self._group.broadcast([tensor.detach().to("cpu").contiguous()])
            for tensor in part.values()
        ]
        for work in waiting:
            work.wait()


def join_group(name: str, port: int, rank: int, size: int, timeout_s: float) -> Any:
    """Join a second process group at ``tcp://127.0.0.1:port`` under the keys that SGLang's workers
    use.

    They create theirs with torch's private helper and a store prefixed by the group's name, and so
    must this process: a group composed from public parts would look for its peers under other keys.
    """
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous(f"tcp://{HOST}:{port}", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    helper = distributed_c10d._new_process_group_helper
    option = (
        "backend_options"
        if "backend_options" in inspect.signature(helper).parameters
        else "pg_options"
    )
    options: dict[str, Any] = {"group_name": GroupName(name), "timeout": timeout, option: None}
    group: Any = helper(size, rank, [], Backend("gloo"), PrefixStore(name, store), **options)
    # destroying it needs them
    distributed_c10d._world.pg_group_ranks[group[0]] = {number: number for number in range(size)}
    return group[0]


def split_tensors(
    tensors: Mapping[str, torch.Tensor], most_bytes: int = BUCKET_BYTES
) -> Iterator[dict[str, torch.Tensor]]:
    """Split the tensors in order into parts of at most ``most_bytes``; a larger tensor is a part by
    itself.
    """
    part: dict[str, torch.Tensor] = {}
    size_used = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if part and size_used + size > most_bytes:
            yield part
            part = {}
            size_used = 0
        part[name] = tensor
        size_used += size
    if part:
        yield part


def meta_tensors(
    model_path: str, dtype: str, *, trust_remote_code: bool
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the model's tensors by name as in an update, but on the meta device, and the model.

    The values are in the server's memory and cannot be read here.

    Raises:
        UserError: if there is no model at the path, or transformers does not know it.
    """
    import_transformers()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            model_path, trust_remote_code=trust_remote_code
        )
        with torch.device("meta"):
            options = {"dtype": getattr(torch, dtype), "trust_remote_code": trust_remote_code}
            model = transformers.AutoModelForCausalLM.from_config(config, **options)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model path {model_path!r}: no causal language model: {reason}") from None
    if names := stored_names(Path(model_path)):
        use_conversions(model, names, list(model.state_dict()))
    return HeldWeights(model).tensors(), model


def _in_thread(work: Any) -> asyncio.Future[Any]:
    """Run in a daemon thread: a broadcast whose peer is gone hangs until its timeout and must not
    delay the exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        try:
            result = work()
            failed = None
        except Exception as error:  # noqa: BLE001 - raised again in the caller
            result = None
            failed = error
        try:
            loop.call_soon_threadsafe(settle, result, failed)
        except RuntimeError:
            return  # the loop is closed

    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    threading.Thread(target=run, name="sglang-weights", daemon=True).start()
    return future
