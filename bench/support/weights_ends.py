"""The two processes of ``bench.weights``, which send and receive in lockstep through the parts that
a run uses.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bench.support.rendezvous import NAME, MeetingPlace
from broker.contract import wire
from broker.contract.wire import Carrier
from broker.weights import fp8
from broker.weights.bucket_payload import ReferenceBytes
from broker.weights.carriers.gloo import GLOO
from broker.weights.group import Group, WaitMonitor, WeightGroup
from broker.weights.memory.copying import copy_all
from broker.weights.memory.shared import SegmentReader, SharedSegment
from broker.weights.memory.staging import FlatBuffer, StagingBuffers, plan_of
from broker.weights.protocol.session import TransferSettings, session_name
from broker.weights.receiver.buffers import ReceiveBuffers
from broker.weights.receiver.follow import follow
from broker.weights.rendezvous.board_request import BoardStore
from broker.weights.sender.membership import StartTransfer
from broker.weights.sender.transfer import lead
from rollout.engines.hf.weights import HeldWeights

HOST: Final = "127.0.0.1"
CPU: Final = torch.device("cpu")
SETTINGS: Final = TransferSettings(timeout_s=60.0, connect_timeout_s=60.0)
WAIT: Final = timedelta(seconds=120)
WARM_UP: Final = 2  # pairs: pages, sockets
SMALL_TENSORS: Final = 4_000


def large_model(num_layers: int) -> dict[str, Tensor]:
    """Tensors of a decoder with hidden size 768: 7.1 M parameters a layer and 15.4 M in the
    embedding, fp32.
    """
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (20_000, 768)}
    for layer in range(num_layers):
        at = f"layers.{layer}"
        shapes |= {f"{at}.attn.qkvo.weight": (4 * 768, 768), f"{at}.mlp.up.weight": (3072, 768)}
        shapes |= {f"{at}.mlp.down.weight": (768, 3072), f"{at}.norm.weight": (768,)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def small_tensors() -> dict[str, Tensor]:
    """4,000 tensors of 8 KiB, the size of what adapters, norms and biases are made of, fp32."""
    generator = torch.Generator().manual_seed(0)
    return {f"t{index:04}": torch.rand(2048, generator=generator) for index in range(SMALL_TENSORS)}


class TensorHolder(torch.nn.Module):
    """Tensors as the parameters of a model."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


class ChannelEnd:
    """One end of a weight channel that carries one model.

    Args:
        delta: only what has changed, by gloo.
        kept: the engine computes from the buffer that it is given; else it copies.
        shared: by shared memory; else by gloo.
        dtype: what the model travels as.

    Attributes:
        copies: seconds of the sender's copies into staging.
    """

    def __init__(
        self,
        store: Any,
        place: MeetingPlace,
        rank: int,
        serial: int,
        model: dict[str, Tensor],
        bucket_mib: float,
        *,
        delta: bool,
        kept: bool,
        shared: bool,
        dtype: str | None,
        carrier: Carrier = "gloo",
        settings: TransferSettings = SETTINGS,
    ) -> None:
        self.store = store
        self.place = place
        self.rank = rank
        self.settings = settings
        self.carrier = carrier
        self.serial = serial
        self.model = model
        self.shared = shared
        self.plan, self.dtype, self.copies = (
            plan_of(model, bucket_mib, dtype=dtype),
            dtype,
            list[float](),
        )
        self.window: SegmentReader | None = None
        segment = SharedSegment(self.plan) if rank == 0 and shared else None
        if segment is not None:
            store.set(f"segment/{serial}", segment.address)
        elif shared:
            self.window = SegmentReader(store.get(f"segment/{serial}").decode(), self.plan)
        self.staging = StagingBuffers(self.plan, memory=segment) if rank == 0 else None
        self.base = ReferenceBytes(self.plan, full_every=10**9) if rank == 0 and delta else None
        self.buffers = ReceiveBuffers(kept=kept and dtype != fp8.NAME)
        self.flat = FlatBuffer(self.plan)
        self.engine = HeldWeights(TensorHolder(model)) if kept else None
        self.communicator: Group | None = None
        self.uses = 0
        self.sent_bytes = 0

    def transfer(self, version: int, digest: str = "") -> None:
        """Send the staged or still packing version to the other end."""
        session = session_name(1, self.serial, self.uses)
        self.uses += 1
        if self.staging is not None:
            start = StartTransfer(
                session,
                version,
                (NAME,),
                fresh=self.uses == 1 and not self.shared,
                num_shared=int(self.shared),
                carrier=self.carrier,
            )
            with self.staging.sending(version) as staged:
                sent = lead(
                    self.store,
                    start,
                    staged,
                    self.communicator,
                    self.settings,
                    WaitMonitor(),
                    self.base,
                )
            self.communicator = sent.communicator
            self.sent_bytes = sent.size_bytes
        else:
            answer = wire.WeightsSession(
                session=session,
                rank=1,
                world_size=2 - self.shared,
                host=self.place.address.host,
                port=self.place.address.port,
                key=self.place.address.key,
                version=version,
                timeout_s=self.settings.timeout_s,
                carrier="shared" if self.shared else self.carrier,
            )
            arrival = self.buffers.take(self.plan, CPU)
            received = follow(
                self.store,
                answer,
                digest,
                arrival,
                self.communicator,
                self.settings,
                WaitMonitor(),
                self.window,
            )
            self.communicator = received.communicator
            self.flat = arrival.flat
            self.buffers.arrived(arrival, received.digest)

    def whole(self, version: int) -> None:
        """Copy, digests, transfer, load; on the sender in three threads, as in
        ``broker.weights.sender.send``.
        """
        if self.staging is None:
            self.transfer(version)
            if self.engine is not None:
                self.engine.load(
                    self.flat.tensors if self.dtype != fp8.NAME else self._dequantised()
                )
            else:
                copy_all((self.model[name], view) for name, view in self.flat.tensors.items())
            return
        staging = self.staging
        begun = threading.Event()
        threads = [threading.Thread(target=self._write, args=(staging, version, begun))]
        threads[0].start()
        begun.wait()
        threads.append(threading.Thread(target=staging.digest, args=(version,)))
        threads[1].start()
        self.transfer(version)
        for thread in threads:
            thread.join()

    def _write(self, staging: StagingBuffers, version: int, begun: threading.Event) -> None:
        started = time.perf_counter()
        staging.write(version, self.model, begun.set)
        self.copies.append(time.perf_counter() - started)

    def _dequantised(self) -> dict[str, Tensor]:
        return fp8.DequantizedModel(
            self.flat.tensors, {name: tensor.dtype for name, tensor in self.model.items()}
        ).made()


class EndProcess:
    """One process; the two run the same rounds in lockstep.

    Args:
        store: of the rendezvous; None: connect to the place.
        settings: of the channels, with the address of this end.
    """

    def __init__(
        self,
        rank: int,
        place: MeetingPlace,
        options: argparse.Namespace,
        store: BoardStore | None = None,
        settings: TransferSettings = SETTINGS,
    ) -> None:
        torch.set_num_threads(1)
        self.rank = rank
        self.place = place
        self.options = options
        self.settings = settings
        self.store = store or place.connect()
        patient = replace(settings, timeout_s=60.0, connect_timeout_s=60.0)
        self.bare = WeightGroup(self.store, "bare", rank, 2, carrier=GLOO, settings=patient)
        self.meetings = 0
        self.channels = 0

    def channel(
        self,
        model: dict[str, Tensor],
        *,
        shared: bool,
        delta: bool = False,
        kept: bool = True,
        dtype: str | None = None,
        backend: Carrier = "gloo",
    ) -> ChannelEnd:
        self.channels += 1
        more: dict[str, Any] = {
            "delta": delta,
            "kept": kept,
            "shared": shared,
            "dtype": dtype,
            "carrier": backend,
        }
        more["settings"] = self.settings
        return ChannelEnd(
            self.store, self.place, self.rank, self.channels, model, self.options.bucket_mib, **more
        )

    def meet(self) -> None:
        self.meetings += 1
        self.store.set(f"meet/{self.meetings}/{self.rank}", "")
        self.store.wait([f"meet/{self.meetings}/{1 - self.rank}"], WAIT)

    def agreed(self, what: str, mine: bool) -> bool:
        self.store.set(f"agreed/{what}/{self.rank}", str(mine))
        self.store.wait([f"agreed/{what}/{1 - self.rank}"], WAIT)
        return mine and bool(self.store.get(f"agreed/{what}/{1 - self.rank}") == b"True")

    def timed(self, call: Callable[[], None]) -> float:
        self.meet()
        started = time.perf_counter()
        call()
        self.meet()
        return time.perf_counter() - started

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self.bare._issue(tensor).wait()

    def pairs(self, *calls: Callable[[int], None]) -> list[list[float]]:
        """Return the seconds of each call, pair by pair in alternating order."""
        taken: list[list[float]] = []
        for pair in range(-WARM_UP, self.options.pairs):
            order = list(enumerate(calls))
            turn = order if pair % 2 else order[::-1]
            seconds = {which: self.timed(partial(call, pair + 100)) for which, call in turn}
            if pair >= 0:
                taken.append([seconds[which] for which in range(len(calls))])
        return taken
