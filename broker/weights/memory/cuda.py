"""A GPU's memory that other processes of this host can open (CUDA IPC). Not run on a GPU yet.

The memory is asked of the driver itself, not of torch's allocator: a piece of its own begins where its handle says, is
neither cut up nor moved (expandable segments cannot be exported this way at all), and has none of the reference counts
that torch keeps in shared files for tensors that it sends, which a process killed by SIGKILL leaves behind or leaves
too high. It is never freed before the process ends, for CUDA leaves undefined what a mapping of freed memory is. Facts
from the reference of the CUDA driver API, sections "memory management", "primary context management" and "device
management": a handle opens in other processes only; each must be closed; one context for each device may open it; a
handle already open is counted, not mapped again; and from the CUDA programming guide, "interprocess communication":
only allocations of whole blocks of 2 MiB should be shared.
"""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final
from weakref import finalize

import torch
from torch import Tensor

from broker.weights.group import first_line
from broker.weights.memory.devices import MemoryCard, SharedDevice

log = logging.getLogger(__name__)

LIBRARY: Final = "libcuda.so.1"  # the driver's own, one name for every CUDA version
HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE
UNIT_BYTES: Final = 16
# what is no multiple may be cut from a block with others' memory, all of which would be shared
BLOCK_BYTES: Final = 2 << 20
LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle; passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


Pointer = ctypes.c_uint64  # CUdeviceptr
Context = ctypes.c_void_p  # CUcontext
OUT: Final = ctypes.POINTER
FUNCTIONS: Final[dict[str, list[Any]]] = {
    "cuInit": [ctypes.c_uint],
    "cuGetErrorName": [ctypes.c_int, OUT(ctypes.c_char_p)],
    "cuDeviceGet": [OUT(ctypes.c_int), ctypes.c_int],
    "cuDeviceGetUuid_v2": [OUT(ctypes.c_ubyte * UNIT_BYTES), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [OUT(Context), ctypes.c_int],
    "cuCtxPushCurrent_v2": [Context],
    "cuCtxPopCurrent_v2": [OUT(Context)],
    "cuMemAlloc_v2": [OUT(Pointer), ctypes.c_size_t],
    "cuMemFree_v2": [Pointer],
    "cuIpcGetMemHandle": [OUT(IpcHandle), Pointer],
    "cuIpcOpenMemHandle_v2": [OUT(Pointer), IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [Pointer],
}


class CudaDriver:
    """What torch has no name for, of the GPUs that this process sees, by torch's numbers for them.

    Args:
        library: has the functions above; None: the driver's.

    Raises:
        OSError: there is no driver, or none for this; from any function: what it answered.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in FUNCTIONS.items():
            if (function := getattr(self._library, name, None)) is None:
                raise OSError(errno.ENOSYS, f"{LIBRARY} has no function {name}: the driver is too old")
            function.argtypes, function.restype = types, ctypes.c_int
        self._call("cuInit", 0)
        self._contexts: dict[int, Any] = {}

    def unit(self, index: int) -> bytes:
        """UUID of a GPU, or of the part of one that this process was given, 16 bytes."""
        found = (ctypes.c_ubyte * UNIT_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device(index))
        return bytes(found)

    def allocate(self, index: int, size_bytes: int) -> int:
        """Address of a new piece of memory."""
        pointer = Pointer()
        with self._in_context(index):
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), size_bytes)
        return int(pointer.value)

    def free(self, index: int, pointer: int) -> None:
        """Give back what nobody else has been told of."""
        with self._in_context(index):
            self._call("cuMemFree_v2", pointer)

    def export(self, index: int, pointer: int) -> bytes:
        """Handle of a piece that begins there, 64 bytes."""
        handle = IpcHandle()
        with self._in_context(index):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, index: int, handle: bytes) -> int:
        """Address at which this process sees another one's piece."""
        pointer = Pointer()
        with self._in_context(index):
            self._call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), IpcHandle.from_buffer_copy(handle), LAZY_PEER_ACCESS
            )
        return int(pointer.value)

    def close(self, index: int, pointer: int) -> None:
        """Let go of what was opened."""
        with self._in_context(index):
            self._call("cuIpcCloseMemHandle", pointer)

    def _device(self, index: int) -> int:
        found = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(found), index)
        return found.value

    @contextmanager
    def _in_context(self, index: int) -> Iterator[None]:
        """torch's own context of a GPU, which stays this process's; the thread's current one is what it was
        afterwards.
        """
        if index not in self._contexts:
            made = Context()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(made), self._device(index))
            self._contexts[index] = made
        self._call("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(Context()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            said = ctypes.c_char_p()
            unknown = self._library.cuGetErrorName(code, ctypes.byref(said))
            raise OSError(
                errno.EIO, f"{name}: {f'error {code}' if unknown or said.value is None else said.value.decode()}"
            )


class _Mapped:
    """Memory that is not torch's, as torch takes it: the tensor made of it holds it."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice(SharedDevice):
    """One GPU as this process uses it. Nothing is loaded and nothing is asked before it is used.

    Args:
        device: ``cuda`` or ``cuda:N`` by this process's numbers: the learner's that lends, or the one that a server
        receives on.
        driver: None: the real one.
    """

    kind = "cuda"

    def __init__(self, device: str | torch.device, driver: CudaDriver | None = None) -> None:
        self._given, self._made = torch.device(device), driver
        self._stream: torch.cuda.Stream | None = None

    def lend(self, size_bytes: int) -> tuple[Tensor, MemoryCard]:
        with _torch_tells():
            torch.cuda.empty_cache()  # what torch keeps of freed memory nobody else is given
            driver, index = self._driver, self._index
            pointer = driver.allocate(index, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            try:
                card = MemoryCard(self.kind, driver.unit(index), size_bytes, driver.export(index, pointer))
            except OSError:
                driver.free(index, pointer)
                raise
            made = self._tensor(pointer, size_bytes, index)
            made.zero_()
            torch.cuda.synchronize(index)
        return made, card

    def open(self, card: MemoryCard) -> Tensor:
        if len(card.handle) != HANDLE_BYTES:
            raise OSError(errno.EINVAL, f"a handle of {len(card.handle)} bytes is none of CUDA's")
        with _torch_tells():
            units = [self._driver.unit(index) for index in range(torch.cuda.device_count())]
            if card.unit not in units:
                raise OSError(
                    errno.ENODEV, f"{name_of(card.unit)} is hidden from this process, see CUDA_VISIBLE_DEVICES"
                )
            # in that GPU's own context, so that copies to another one work with and without peer access
            index = units.index(card.unit)
            return self._tensor(self._driver.open(index, card.handle), card.size_bytes, index, opened=True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        torch.cuda.synchronize(self._index)
        self._stream = self._stream or torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream(target.device).synchronize()

    @cached_property
    def _index(self) -> int:
        return self._given.index if self._given.index is not None else torch.cuda.current_device()

    @property
    def _driver(self) -> CudaDriver:
        if self._made is None:
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._made = CudaDriver()
        return self._made

    def _tensor(self, pointer: int, size_bytes: int, index: int, *, opened: bool = False) -> Tensor:
        mapped = _Mapped(pointer, size_bytes)
        if opened:
            finalize(mapped, _close, self._driver, index, pointer).atexit = False
        made = torch.as_tensor(mapped, device=f"cuda:{index}")
        if made.data_ptr() != pointer:
            raise OSError(errno.EIO, "torch has copied the memory instead of taking it as it is")
        return made


@contextmanager
def _torch_tells() -> Iterator[None]:
    """torch's errors as those of the driver."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # the second where torch is built without CUDA
        raise OSError(errno.EIO, first_line(error)) from None


def _close(driver: CudaDriver, index: int, pointer: int) -> None:
    try:
        driver.close(index, pointer)
    except OSError as error:
        log.warning("weights: letting go of the learner's GPU memory: %s", error.strerror)


def name_of(unit: bytes) -> str:
    """A GPU's UUID as nvidia-smi writes it."""
    text = unit.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def device_of(device: torch.device) -> SharedDevice | None:
    """What opens the memory of a learner's GPU for a server whose weights arrive there; None where they arrive in host
    memory.
    """
    return CudaDevice(device) if device.type == "cuda" else None
