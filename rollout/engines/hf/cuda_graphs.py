"""Records passes as CUDA graphs, which share one pool of memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import torch

# free memory below which nothing is recorded: others on the device, and passes of other shapes,
# need some
RESERVED_BYTES: Final = 1 << 30


class CudaGraphRecorder:
    """See ``PassRecorder``; for one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def has_room(self) -> bool:
        if torch.cuda.mem_get_info(self._device)[0] < RESERVED_BYTES:
            torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0] >= RESERVED_BYTES

    def check(self, work: Callable[[], None]) -> None:
        # of this process, so before other threads use the device
        mode = torch.cuda.get_sync_debug_mode()
        _set_sync_mode("error")
        try:
            with self._own_stream():
                work()
        finally:
            _set_sync_mode(mode)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with self._own_stream():
            work()  # loads kernels and allocates workspaces, which a capture cannot
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # of what only this stream could use again
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # other threads may use the device: weights arrive in one
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                self._end_failed_capture(graph)
                raise
            graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def drop(self) -> None:
        torch.cuda.synchronize(self._device)  # a replay may be under way
        self._pool = torch.cuda.graph_pool_handle()

    def _end_failed_capture(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # then torch leaves the allocator as it was during the capture
            with suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _set_sync_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        torch.cuda.set_sync_debug_mode(mode)


def make_recorder(device: torch.device) -> CudaGraphRecorder | None:
    """Return a recorder; None if the device has no CUDA graphs."""
    return CudaGraphRecorder(device) if device.type == "cuda" else None
