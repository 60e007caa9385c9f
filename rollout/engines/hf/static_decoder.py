"""Decodes with static passes, which are recorded once for each shape and then replayed.

A pass of a small model spends most of its time on the processor, which starts thousands of kernels
on the device; a recorded one is started as a whole. A shape is recorded when it has been needed a
few times. Until then a larger recorded shape serves, or the pass runs as any other.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.engines.hf.forward_pass import Segment
from rollout.engines.hf.static_pass import (
    GATHER_BYTES,
    StaticPass,
    StaticShape,
    fitting_shapes,
    input_rows,
)

log = logging.getLogger(__name__)

MAX_RECORDINGS: Final = 48  # each takes some MiB of the device's memory
RECORD_AFTER: Final = 3  # uses of a shape; recording takes about as long as three other passes
MAX_WASTE: Final = 4  # times the attention of the smallest shape, that a recorded one may do


class PassRecorder(Protocol):
    """Records work on a device."""

    def has_room(self) -> bool:
        """Return whether the device has memory for another recording."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that does the same work again, on the same memory.

        Raises:
            RuntimeError: if the work cannot be recorded.
        """
        ...

    def check(self, work: Callable[[], None]) -> None:
        """Do work that will be recorded.

        Raises:
            RuntimeError: if it waits for the device.
        """
        ...

    def drop(self) -> None:
        """Wait until no recording is replayed; they are dropped then."""
        ...


class StaticInputs:
    """The inputs of static passes on the device, and the host memory that they are copied from."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.empty(size, dtype=torch.int64, pin_memory=is_cuda)
        self._array: npt.NDArray[np.int64] = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        if is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def write(self, rows: npt.NDArray[np.int64]) -> None:
        """Copy the inputs of a pass to the device."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy has read the host's memory
        self._array[: rows.size] = rows.reshape(-1)
        self._device[: rows.size].copy_(self._host[: rows.size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def view(self, rows: int) -> Tensor:
        """Return the inputs of a pass of this many rows, (4, rows)."""
        return self._device[: 4 * rows].view(4, rows)


class StaticDecoder:
    """Static passes of one model; not thread-safe.

    Args:
        run: computes a pass and returns the logits of all rows, (rows, vocabulary).
        token_bytes: of the keys and values of the largest layer.
    """

    def __init__(
        self,
        run: Callable[[StaticPass], Tensor],
        recorder: PassRecorder,
        *,
        num_slots: int,
        max_context: int,
        token_bytes: int,
        device: torch.device,
    ) -> None:
        self._run = run
        self._recorder = recorder
        self._num_slots = num_slots
        self._max_context = max_context
        self._token_bytes = token_bytes
        self._inputs = StaticInputs(4 * num_slots, device)
        self._logits: Tensor | None = None  # of the last pass, (slots, vocabulary)
        self._recordings: OrderedDict[StaticShape, Callable[[], None]] = OrderedDict()
        self._uses: Counter[StaticShape] = Counter()
        self._is_full = False
        self._addresses: tuple[int, ...] = ()
        self.problem = ""  # why it does not record any more
        self.has_replayed = False  # the last call of decode had a recording

    @property
    def shapes(self) -> list[StaticShape]:
        """The recorded shapes."""
        return list(self._recordings)

    def decode(
        self, segments: Sequence[Segment], token_ids: npt.NDArray[np.int64]
    ) -> Tensor | None:
        """Run one new token of each sequence.

        Returns:
            Logits (sequences, vocabulary), valid until the next pass; None if no recording serves.
        """
        self.has_replayed = False
        if self.problem:
            return None
        slots = np.array([segment.slot for segment in segments], np.int64)
        starts = np.array([segment.start for segment in segments], np.int64)
        shape = self._recorded_shape(slots, int(starts.max()) + 1)
        if shape is None:
            return None
        self.has_replayed = True
        self._recordings.move_to_end(shape)
        return self._replay(shape, slots, starts, token_ids)

    def decode_as(
        self,
        segments: Sequence[Segment],
        token_ids: npt.NDArray[np.int64],
        *,
        gathers: bool,
    ) -> Tensor:
        """Run one new token of each sequence in place or gathered, recording the shape if need be.

        Raises:
            RuntimeError: if it cannot be recorded.
        """
        slots = np.array([segment.slot for segment in segments], np.int64)
        starts = np.array([segment.start for segment in segments], np.int64)
        longest = int(starts.max()) + 1
        shape = fitting_shapes(slots, longest, self._num_slots, self._max_context)[gathers]
        if shape not in self._recordings:
            self._inputs.write(input_rows(shape, slots, starts, token_ids, self._num_slots))
            self._recorder.check(lambda: self._compute(shape))
            self._record(shape)
        return self._replay(shape, slots, starts, token_ids)

    def drop(self) -> None:
        """Drop all recordings: what they read or write moves."""
        self._recorder.drop()
        self._recordings.clear()
        self._uses.clear()
        self._logits = None
        self._is_full = False

    def keep_addresses(self, tensors: Iterable[Tensor]) -> None:
        """Drop all recordings if one of the model's tensors has moved since the last call."""
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if addresses != self._addresses and self._recordings:
            log.info("weights have moved: dropping %d CUDA graphs", len(self._recordings))
            self.drop()
        self._addresses = addresses

    def _recorded_shape(self, slots: npt.NDArray[np.int64], length: int) -> StaticShape | None:
        """Return the recorded shape for a pass; record one if it has been needed often enough."""
        fitting = self._fitting_shape(slots, length)
        if fitting in self._recordings:
            return fitting
        self._uses[fitting] += 1
        if self._uses[fitting] >= RECORD_AFTER and self._try_recording(fitting):
            return fitting
        covering = [
            shape
            for shape in self._recordings
            if shape.covers(slots, length) and shape.cost <= MAX_WASTE * fitting.cost
        ]
        return min(covering, key=lambda shape: shape.cost, default=None)

    def _fitting_shape(self, slots: npt.NDArray[np.int64], length: int) -> StaticShape:
        in_place, gathered = fitting_shapes(slots, length, self._num_slots, self._max_context)
        copied = gathered.rows * gathered.length * self._token_bytes
        return gathered if gathered.cost < in_place.cost and copied <= GATHER_BYTES else in_place

    def _try_recording(self, shape: StaticShape) -> bool:
        if self._is_full:
            return False
        if not self._recorder.has_room():
            self._is_full = True
            log.info("no memory for CUDA graphs beyond %d", len(self._recordings))
            return False
        try:
            # the inputs of any pass will do, as no row writes to a slot
            empty = np.zeros(0, np.int64)
            self._inputs.write(input_rows(shape, empty, empty, empty, self._num_slots))
            self._record(shape)
        except RuntimeError as error:
            self.turn_off(_first_line(error))
            return False
        return True

    def turn_off(self, problem: str) -> None:
        """Record nothing from now on."""
        self.drop()
        self.problem = problem
        log.warning("engine hf decodes without CUDA graphs, more slowly: %s", problem)

    def _record(self, shape: StaticShape) -> None:
        while len(self._recordings) >= MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        self._recordings[shape] = self._recorder.record(lambda: self._compute(shape))

    def _compute(self, shape: StaticShape) -> None:
        layout = StaticPass(
            shape, self._inputs.view(shape.rows), self._num_slots, self._max_context
        )
        logits = self._run(layout)
        if self._logits is None:
            self._logits = logits.new_empty((self._num_slots, logits.shape[-1]))
        self._logits[: shape.rows].copy_(logits)

    def _replay(
        self,
        shape: StaticShape,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        token_ids: npt.NDArray[np.int64],
    ) -> Tensor:
        self._inputs.write(input_rows(shape, slots, starts, token_ids, self._num_slots))
        self._recordings[shape]()
        assert self._logits is not None
        if shape.gathers or int(slots[-1]) + 1 == len(slots):
            return self._logits[: len(slots)]
        return self._logits.index_select(0, self._inputs.view(shape.rows)[3, : len(slots)])


def _first_line(error: BaseException) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
