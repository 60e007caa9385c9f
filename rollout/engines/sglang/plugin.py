"""Plugin that SGLang loads in its processes, so that its workers receive the learner's transfers
themselves.

SGLang finds it by this package's entry point ``sglang.srt.plugins``; so the package must be
installed in SGLang's environment. The rollout server makes the calls of SGLang's own update from a
process group, under another group name:

    rollout server                                         each worker
    /destroy_weights_update_group    ------------------->  cancels what was begun, and says that the plugin is here
    /init_weights_update_group, file of WorkerTransfer ->  a thread meets the learner and the other members
    /update_weights_from_distributed ------------------->  loads tensors as they arrive; all workers must succeed
                                     <-------------------  the digest of all bytes

Tensors are loaded by SGLang's own code, between ``begin_weight_update`` and ``end_weight_update``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from broker.weights.group import first_line
from broker.weights.receiver.workers import WorkerReceiver

GROUP: Final = "rlearner"
HERE: Final = "rlearner is here"
DIGEST: Final = "digest="
UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"

Outcome: TypeAlias = tuple[bool, str]  # as SGLang's: success, message

# in place of a list of tensors: they come from the transfer that was begun
_BEGUN: Final = object()
# by tensor-parallel rank; a process of SGLang has one
_receivers: Final[dict[int, WorkerReceiver]] = {}


def register() -> None:
    """Hook the methods of SGLang's workers; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {
        "init_weights_update_group": begin,
        "destroy_weights_update_group": cancel,
        "receive_weights_from_distributed": receive,
        "load_weights_from_distributed": load,
    }
    for name, hook in hooks.items():
        HookRegistry.register(f"{UPDATER}.{name}", hook, HookType.AROUND)


def begin(
    original: Callable[..., Outcome],
    updater: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> Outcome:
    """Start to receive the transfer in the file ``master_address``, next to generation."""
    if group_name != GROUP:
        return original(
            updater,
            master_address,
            master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )
    try:
        text = Path(master_address).read_text()
        receiver = _receivers.setdefault(
            updater.tp_rank, WorkerReceiver(updater.tp_rank, _device(updater))
        )
        receiver.begin(text)
    except (OSError, ValueError, RuntimeError) as error:
        return False, first_line(error)
    return True, HERE


def cancel(original: Callable[..., Outcome], updater: Any, group_name: str) -> Outcome:
    """Cancel the transfer that was begun, if any."""
    if group_name != GROUP:
        return original(updater, group_name)
    if (receiver := _receivers.get(updater.tp_rank)) is not None:
        receiver.cancel("the server has cancelled it")
    return True, HERE


def receive(original: Callable[..., Any], updater: Any, *, group_name: str, **rest: Any) -> Any:
    """Return a mark for ``load``: nothing is received before it is loaded."""
    return original(updater, group_name=group_name, **rest) if group_name != GROUP else _BEGUN


def load(original: Callable[..., Outcome], updater: Any, named_tensors: Any) -> Outcome:
    """Load the tensors of the transfer as they arrive; fail on each worker if one fails."""
    if named_tensors is not _BEGUN:
        return original(updater, named_tensors)

    def load_some(tensors: Any) -> None:
        is_loaded, message = original(updater, list(tensors))
        if not is_loaded:
            raise RuntimeError(message)
        if updater.device == "cuda":
            torch.cuda.synchronize()  # the memory of these tensors is used again

    try:
        receiver = _receivers.get(updater.tp_rank)
        if receiver is None:
            raise RuntimeError("no transfer was begun")
        problem = ""
        digest = receiver.load(load_some)
    except Exception as error:  # noqa: BLE001 - the other workers wait for this one's word
        problem = first_line(error)
        digest = ""
    if not _all_well(not problem):
        return False, problem or "another worker could not load the weights, see the server's log"
    return True, DIGEST + digest


def _all_well(well: bool) -> bool:
    """Return whether all tensor-parallel workers are well; they all call this: only the first one's
    answer is sent.
    """
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return well
    flag = torch.tensor([int(well)])
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return bool(flag.item())


def _device(updater: Any) -> torch.device:
    return (
        torch.device("cuda", updater.gpu_id)
        if updater.device == "cuda"
        else torch.device(updater.device)
    )
