"""vLLM worker extension: a backend of its weight-transfer API, over shared memory or the learner's
transfer.

vLLM imports this module in every worker before it creates the model.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from vllm import _custom_ops as ops
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform

from broker.weights.receiver.workers import WorkerReceiver
from rlearner_text.stored_form import as_stored
from rollout.engines.vllm.shared_weights import OWNER, Layout, map_shared

BACKEND: Final = "rlearner"
KEPT_SHAPES: Final = 32  # oneDNN kernels per layer, as in vLLM
EXTENSION: Final = "rollout.engines.vllm.worker.WorkerExtension"


class WorkerExtension:
    """Methods that vLLM adds to its worker."""

    model_runner: Any
    weight_transfer_engine: Any
    vllm_config: Any
    rank: int
    device: torch.device

    def begin_transfer(self, text: str) -> None:
        """Start to receive a ``WorkerTransfer`` next to generation; loaded by an update with
        ``received``.
        """
        engine = self.weight_transfer_engine
        if engine.receiver is None:
            parallel = self.vllm_config.parallel_config
            worker = parallel.data_parallel_index * parallel.world_size + self.rank
            engine.receiver = WorkerReceiver(worker, self.device)
        engine.receiver.begin(text)

    def cancel_transfer(self, reason: str) -> None:
        """Cancel the transfer that was begun."""
        if self.weight_transfer_engine.receiver is not None:
            self.weight_transfer_engine.receiver.cancel(reason)

    def received_digest(self) -> str:
        """Return the digest of all bytes that this worker received last."""
        digest: str = self.weight_transfer_engine.digest
        return digest

    def wipe_kv_cache(self) -> None:
        """Zero the KV cache: a NaN in a block persists, because attention multiplies masked values
        by zero.
        """
        for cache in self.model_runner.kv_caches:
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                tensor.zero_()


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Location of the weights, see ``SharedWeights``, and how vLLM reads them, see
    ``stored_views``.
    """

    path: str
    size_bytes: int
    layout: Layout
    views: dict[str, list[Any]]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where the weights are: in shared memory, or in the transfer that ``begin_transfer`` has
    begun.
    """

    received: bool = False


class LearnerWeightsEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Loads the learner's weights into the model at every update."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    receiver: WorkerReceiver | None = None
    digest = ""
    _tensors: dict[str, torch.Tensor] | None = None
    _views: Mapping[str, list[Any]] = MappingProxyType({})

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._tensors = map_shared(init_info.path, init_info.size_bytes, init_info.layout)
        self._views = init_info.views

    def start_weight_update(self) -> None:
        if not current_platform.is_cpu():
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        names: set[str] = set()
        tells = True  # whether the model says what it has set

        def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            nonlocal tells
            names = self.model.load_weights(as_stored(tensors, self._views))
            tells = tells and names is not None
            names.update(names or ())
            if not current_platform.is_cpu():
                torch.accelerator.synchronize()  # the memory of these tensors is used again

        if not update_info.received:
            if self._tensors is None:
                raise RuntimeError("the shared weights are not open")
            load(self._tensors.items())
        elif self.receiver is None:
            raise RuntimeError("no transfer was begun")
        else:
            self.digest = self.receiver.load(load)
        if tells and (missed := sorted(dict(self.model.named_parameters()).keys() - names)):
            problem = f"set {len(names)} of vLLM's parameters and miss {len(missed)}, the first is {missed[0]}"
            raise ValueError(f"the weights {problem}")

    def finish_weight_update(self) -> None:
        for layer in self.model.modules():
            if isinstance(packed := getattr(layer, "cpu_linear", None), PackedLinear):
                packed.forget()
        if not current_platform.is_cpu():
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._tensors = None
        if self.receiver is not None:
            self.receiver.cancel("the engine is closing")
            self.receiver.close()
            self.receiver = None


def _end_with(pid: int) -> None:
    """Kill this worker, and with it vLLM's other processes, once the server has exited; they would
    keep its memory.
    """
    try:
        owner = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)

    def watch() -> None:
        select.select([owner], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="owner", daemon=True).start()


class PackedLinear:
    """Multiplies by a packed copy of a layer's weight, on the CPU.

    vLLM's own kernel packs once and drops the original, so that an update would fail or, with tied
    embeddings, silently keep the old output layer. Here an update only has to call ``forget``.
    Without packing, a product takes up to twice as long (AVX-512, float32).
    """

    def __init__(self) -> None:
        self._handler: Any = None

    def forget(self) -> None:
        """Pack the weight again before its next use."""
        self._handler = None

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if self._handler is None:
            self._handler = ops.create_onednn_mm(weight.t(), KEPT_SHAPES)
        product: torch.Tensor = ops.onednn_mm(self._handler, x, bias)
        return product


def _updatable_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Keep the weight that vLLM would remove, for updates."""
    packs = ops._supports_onednn and layer.weight.ndim == 2
    layer.cpu_linear = PackedLinear() if packs else torch.nn.functional.linear  # type: ignore[assignment]


# at import: the server may exit while vLLM starts
if os.environ.get(OWNER, str(os.getpid())) != str(os.getpid()):
    _end_with(int(os.environ[OWNER]))
if current_platform.is_cpu():
    layer_utils.dispatch_cpu_unquantized_gemm = _updatable_linear
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, LearnerWeightsEngine)
