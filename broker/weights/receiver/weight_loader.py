"""Brings a received version into the engine: its buffer, the base of an adapter, loading."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from broker.contract import wire
from broker.errors import TransferFailed
from broker.weights import fp8
from broker.weights.adapter import AdapterBase, First
from broker.weights.group import first_line
from broker.weights.plan import LayoutPlan
from broker.weights.receiver.acceptance import OfferAcceptance
from broker.weights.receiver.buffers import IncomingVersion, ReceiveBuffers
from broker.weights.threads import in_thread

Load = Callable[[Mapping[str, Tensor], wire.WeightsOffer], Awaitable[None]]


class WeightLoader:
    """Loader of one engine's versions; the arguments are those of ``WeightReceiver``.

    Attributes:
        values: weights/{seconds,gbytes_per_s,load_seconds} of the last version.
    """

    def __init__(
        self,
        state: OfferAcceptance,
        plan: LayoutPlan,
        tensors: Mapping[str, Tensor],
        load: Load,
        *,
        bucket_mib: float,
        device: str | torch.device | None,
        kept: bool,
        first: First | None,
        quantised: bool,
    ) -> None:
        self._state = state
        self._plan = plan
        self._tensors = tensors
        self._load = load
        self._device = (
            torch.device(device) if device is not None else next(iter(tensors.values())).device
        )
        self._dtypes = (
            {name: tensor.dtype for name, tensor in tensors.items()} if quantised else None
        )
        self._as_sent = not quantised  # the engine computes with the bytes that the digest covers
        self._foundation = AdapterBase(plan, bucket_mib, tensors, first)
        # an engine gets copies of quantized ones
        self._buffers = ReceiveBuffers(kept=kept and not quantised)
        self.values: dict[str, float] = {}

    async def begin(self) -> None:
        """Compute the digest of the engine's weights if they can be read."""
        if not any(tensor.is_meta for tensor in self._tensors.values()):
            hold = partial(self._buffers.hold, self._plan, self._tensors, self._device)
            self._state.digest = await in_thread(hold, "weights-digest")
        self._tensors = {}  # so that the engine can free them

    def plan(self, adapter: wire.Adapter | None) -> LayoutPlan:
        """Return the plan of what arrives: the model, or an adapter's factors."""
        return self._foundation.plan(adapter)

    async def found(self, offer: wire.WeightsOffer) -> str:
        """Load the base of an adapter at its first offer; return why it failed, empty on success."""
        adapter = offer.adapter
        if adapter is None or offer.plan != self._foundation.plan(adapter).digest:
            return ""
        if not (problem := await in_thread(lambda: self._foundation.lay(adapter), "weights-base")):
            self._state.plans.add(offer.plan)
        return problem

    @property
    def device(self) -> torch.device:
        """The device on which versions sent from a device arrive."""
        return self._device

    def take(self, plan: LayoutPlan, *, on_device: bool = False) -> IncomingVersion:
        """Return the buffer for the next version, on the device or in host memory."""
        return self._buffers.take(plan, self._device if on_device else torch.device("cpu"))

    def rest(self) -> None:
        """Free the buffers, except what the engine computes from; the next version comes whole."""
        self._buffers.rest()

    async def arrived(
        self, arrival: IncomingVersion, digest: str, offer: wire.WeightsOffer, seconds: float
    ) -> None:
        """Have the engine load a complete version.

        Args:
            seconds: that the transfer took.

        Raises:
            TransferFailed: if loading fails, or the probe does not match.
        """
        self._buffers.arrived(arrival, digest)
        self.note_transfer(arrival.flat.plan.size_bytes, seconds)
        tensors = arrival.flat.tensors
        await self._bring_in(
            self._whole(tensors) if offer.adapter is None else self._foundation.merged(tensors),
            offer,
        )

    def note_transfer(self, size_bytes: int, seconds: float) -> None:
        """Note the size and duration of a transfer in ``values``."""
        self.values |= {
            "weights/seconds": seconds,
            "weights/gbytes_per_s": size_bytes / seconds / 1e9,
        }

    async def adopt(self, offer: wire.WeightsOffer) -> None:
        """Have the engine serve the weights that it holds as the offer's version, whose digest
        matches.

        Raises:
            TransferFailed: if loading fails, or the probe does not match.
        """
        if self._as_sent:
            await self._bring_in({}, offer)
            return
        # the engine's first weights in the form in which they would have come; it holds unquantized
        # ones
        buffer = self._buffers.whole()
        if buffer is None:
            self._state.loading()
            raise TransferFailed("the weights held here were not quantized, so they must be sent")
        await self._bring_in(self._whole(buffer.tensors), offer)

    def _whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return received tensors in the form that the engine takes."""
        return tensors if self._dtypes is None else fp8.DequantizedModel(tensors, self._dtypes)

    async def _bring_in(self, tensors: Mapping[str, Tensor], offer: wire.WeightsOffer) -> None:
        """Have the engine load these tensors; if empty, serve what it holds as the offer's version."""
        start = time.monotonic()
        self._state.loading()
        try:
            await self._load(tensors, offer)
        except (TransferFailed, RuntimeError) as error:
            self._buffers.load_failed()
            if isinstance(error, TransferFailed):
                raise
            # an error of torch, for example out of memory
            raise TransferFailed(f"loading failed: {first_line(error)}") from error
        self._as_sent = True
        self.values["weights/load_seconds"] = time.monotonic() - start
