"""Prepares weights for sending: selects the tensors, and probes them. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import numpy as np
from torch import Tensor

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.weights import fp8
from broker.weights.adapter import factor_shapes
from broker.weights.carriers import offered
from broker.weights.memory.cuda import CudaDevice
from broker.weights.memory.staging import plan_of
from broker.weights.probe import make_probe
from broker.weights.sender.send import WeightSender
from broker.weights.sender.transfer import TransferSettings
from learner.backends.base import Backend
from learner.backends.section_checks import stripes_problem
from learner.backends.stripes import RankStripes
from learner.config import TrainSection
from learner.weights.addresses import weights_address

log = logging.getLogger(__name__)

PROBE_TOKENS: Final = 64
# Largest difference between two correct computations of one logprob, in nats: kernels sum in different orders.
PROBE_TOLERANCE: Final = {"float32": 5e-3, "bfloat16": 0.25, "float16": 0.05}


class WeightOffering:
    """Weights of a backend to send: all of them, or only the factors of trained adapters.

    Raises:
        ConfigError: if ``train.weights_backend`` is ipc and the weights are not on a GPU.
    """

    def __init__(self, backend: Backend, train: TrainSection, dtype: str) -> None:
        self._backend, self._train, self._dtype = backend, train, dtype
        self._stripes: RankStripes | None = None
        if train.weights_backend == "ipc" and backend.device.type != "cuda":
            allowed = f"shared with weights on {backend.device.type}: ipc is read in a GPU's memory"
            raise ConfigError("train.weights_backend", "ipc", allowed)
        self.adapter = backend.adapter()  # None: all weights are sent
        if self.adapter is not None:
            mine = {name: factor.shape for name, factor in backend.factors().items()}
            theirs = self._factor_shapes(self.adapter)
            if mine != {name: factor.shape for name, factor in theirs.items()}:  # servers could not map them
                log.warning("weights: servers cannot tell which weights the adapters change; the whole model is sent")
                self.adapter = None

    def sender(self, bus: Bus, roster: Roster, epoch: int) -> WeightSender:
        """Return a sender for the weights, staged on their device.

        Raises:
            ConfigError: if ``train.weights_interface`` is not an interface of this host with an address, or the backend
                cannot send in stripes and must.
        """
        train, device = self._train, self._backend.device
        carriers = offered(train.weights_backend or "auto", on_gpu=device.type == "cuda")
        if self.adapter is None:
            plan = plan_of(self._backend.shapes(), train.weights_bucket_mib, dtype=train.weights_dtype)
        else:
            plan = plan_of(self._factor_shapes(self.adapter), train.weights_bucket_mib)
        self._stripes = self._backend.stripes(plan) if self._wants_stripes() else None
        if self._stripes is None and train.weights_stripes == "always":
            raise ConfigError("train.weights_stripes", "always", f"auto or never with train.backend {train.backend}")
        return WeightSender(
            bus,
            plan,
            epoch=epoch,
            settings=TransferSettings(
                carriers,
                host=weights_address(train.weights_interface, bus.link.url, self._backend.hosts_address),
                port=train.weights_port,
                timeout_s=train.weights_timeout_s,
            ),
            roster=roster,
            device=device,
            delta_full_every=train.weights_full_every if train.weights_delta else None,
            adapter=self.adapter,
            memory=CudaDevice(device) if "ipc" in carriers else None,
            stripes=self._stripes,
        )

    def _factor_shapes(self, adapter: wire.Adapter) -> dict[str, Tensor]:
        """Return what servers will find that the adapters consist of."""
        return factor_shapes(self._backend.shapes(), adapter.targets, adapter.rank, adapter.transposed)

    def _wants_stripes(self) -> bool:
        """Return whether all ranks should send: between nodes, where each has a link of its own."""
        train = self._train
        if train.weights_stripes != "auto":
            return train.weights_stripes == "always"
        return bool(self._backend.hosts_address) and not stripes_problem(train.model_dump())

    def serve(self, sender: WeightSender) -> None:
        """Have the other ranks send their stripes for a sender that has started; called in the training thread."""
        if self._stripes is not None:
            admitted = [sender.admit_rank(rank) for rank in range(1, len(self._stripes.plans))]
            self._stripes.serve(admitted, sender.settings)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the live tensors of the plan, by name."""
        return self._backend.weights() if self.adapter is None else self._backend.factors()

    def probe(self) -> wire.Probe:
        """Return the probe for an offer of the weights."""
        return probe(self._backend, self._dtype, self._train.weights_dtype)


def probe(backend: Backend, dtype: str, wire_dtype: str | None = None) -> wire.Probe:
    """Return fixed tokens, their logprobs under the current weights, and the tolerance of the coarser dtype."""
    tolerance = max(PROBE_TOLERANCE[kind] for kind in (dtype, wire_dtype or dtype) if kind != fp8.NAME)
    token_ids = np.random.default_rng(0).integers(0, backend.vocab_size, PROBE_TOKENS).tolist()
    return make_probe(token_ids, backend.logprobs(token_ids), tolerance=tolerance)
