"""GPU memory that other processes of this host can open (CUDA IPC).

The memory comes from the driver, not from torch's allocator: the handle then refers to the start of
an allocation that is neither split nor moved (expandable segments cannot be exported this way),
without the reference counts that torch keeps in shared files, which a killed process leaves behind.
It is not freed before the process ends, because a mapping of freed memory is undefined in CUDA.
Facts from the reference of the CUDA driver API ("memory management", "primary context management",
"device management"): a handle opens only in other processes; each must be closed; one context per
device may open it; opening it again only counts. From the CUDA programming guide, "interprocess
communication": only allocations of whole blocks of 2 MiB should be shared.
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

LIBRARY: Final = "libcuda.so.1"  # the driver's, the same name for every CUDA version
HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE
UNIT_BYTES: Final = 16
# a smaller allocation may share its block with other memory, which would be exported too
BLOCK_BYTES: Final = 2 << 20
LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag


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
    """Driver functions that torch does not offer, for the visible GPUs by torch's numbers.

    Args:
        library: has the functions above; None: the driver's.

    Raises:
        OSError: if there is no suitable driver; from any method: the driver's error.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL(LIBRARY) if library is None else library
        for name, types in FUNCTIONS.items():
            if (function := getattr(self._library, name, None)) is None:
                raise OSError(
                    errno.ENOSYS, f"{LIBRARY} has no function {name}: the driver is too old"
                )
            function.argtypes = types
            function.restype = ctypes.c_int
        self._call("cuInit", 0)
        self._contexts: dict[int, Any] = {}

    def unit(self, index: int) -> bytes:
        """Return the UUID of a GPU, or of the partition given to this process, 16 bytes."""
        uuid = (ctypes.c_ubyte * UNIT_BYTES)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(index))
        return bytes(uuid)

    def allocate(self, index: int, size_bytes: int) -> int:
        """Allocate memory and return its address."""
        pointer = Pointer()
        with self._in_context(index):
            self._call("cuMemAlloc_v2", ctypes.byref(pointer), size_bytes)
        return int(pointer.value)

    def free(self, index: int, pointer: int) -> None:
        """Free memory that was not exported."""
        with self._in_context(index):
            self._call("cuMemFree_v2", pointer)

    def export(self, index: int, pointer: int) -> bytes:
        """Return the handle of an allocation, 64 bytes."""
        handle = IpcHandle()
        with self._in_context(index):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open(self, index: int, handle: bytes) -> int:
        """Map another process's allocation and return its address here."""
        pointer = Pointer()
        with self._in_context(index):
            copied = IpcHandle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), copied, LAZY_PEER_ACCESS)
        return int(pointer.value)

    def close(self, index: int, pointer: int) -> None:
        """Unmap an allocation that was opened."""
        with self._in_context(index):
            self._call("cuIpcCloseMemHandle", pointer)

    def _device(self, index: int) -> int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device.value

    @contextmanager
    def _in_context(self, index: int) -> Iterator[None]:
        """Make torch's context of a GPU current, and restore the thread's previous one afterwards."""
        if index not in self._contexts:
            context = Context()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(index))
            self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", self._contexts[index])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(Context()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            error_name = ctypes.c_char_p()
            unknown = self._library.cuGetErrorName(code, ctypes.byref(error_name))
            problem = f"{name}: {f'error {code}' if unknown or error_name.value is None else error_name.value.decode()}"
            raise OSError(errno.EIO, problem)


class _Mapped:
    """Foreign memory in the form that torch accepts; the tensor made of it keeps it alive."""

    def __init__(self, pointer: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaDevice(SharedDevice):
    """A GPU as this process uses it. Nothing is loaded before it is used.

    Args:
        device: ``cuda`` or ``cuda:N`` by this process's numbers: of a learner that lends, or a
            server that receives.
        driver: None: the real one.
    """

    kind = "cuda"

    def __init__(self, device: str | torch.device, driver: CudaDriver | None = None) -> None:
        self._given = torch.device(device)
        self._made = driver
        self._stream: torch.cuda.Stream | None = None

    def lend(self, size_bytes: int) -> tuple[Tensor, MemoryCard]:
        with _torch_tells():
            torch.cuda.empty_cache()  # other code cannot use what torch keeps of freed memory
            driver = self._driver
            index = self._index
            pointer = driver.allocate(index, -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES)
            try:
                card = MemoryCard(
                    self.kind, driver.unit(index), size_bytes, driver.export(index, pointer)
                )
            except OSError:
                driver.free(index, pointer)
                raise
            tensor = self._tensor(pointer, size_bytes, index)
            tensor.zero_()
            torch.cuda.synchronize(index)
        return tensor, card

    def open(self, card: MemoryCard) -> Tensor:
        if len(card.handle) != HANDLE_BYTES:
            raise OSError(
                errno.EINVAL, f"a handle of {len(card.handle)} bytes is not a CUDA handle"
            )
        with _torch_tells():
            units = [self._driver.unit(index) for index in range(torch.cuda.device_count())]
            if card.unit not in units:
                problem = (
                    f"{name_of(card.unit)} is hidden from this process, see CUDA_VISIBLE_DEVICES"
                )
                raise OSError(errno.ENODEV, problem)
            # in that GPU's own context, so that copies to another GPU work with and without peer
            # access
            index = units.index(card.unit)
            return self._tensor(
                self._driver.open(index, card.handle), card.size_bytes, index, opened=True
            )

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
        tensor = torch.as_tensor(mapped, device=f"cuda:{index}")
        if tensor.data_ptr() != pointer:
            raise OSError(errno.EIO, "torch copied the memory instead of using it")
        return tensor


@contextmanager
def _torch_tells() -> Iterator[None]:
    """Turn torch's errors into the driver's."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:  # AssertionError if torch is built without CUDA
        raise OSError(errno.EIO, first_line(error)) from None


def _close(driver: CudaDriver, index: int, pointer: int) -> None:
    try:
        driver.close(index, pointer)
    except OSError as error:
        log.warning("weights: closing the learner's GPU memory: %s", error.strerror)


def name_of(unit: bytes) -> str:
    """Return a GPU's UUID as nvidia-smi prints it."""
    text = unit.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def numbered(device: str | torch.device) -> torch.device:
    """Return the device, a GPU with its number: ``torch.cuda.set_device`` refuses a plain ``cuda``."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def device_of(device: torch.device) -> SharedDevice | None:
    """Return the device that opens a learner's GPU memory for a server whose weights arrive there;
    None for a CPU.
    """
    return CudaDevice(device) if device.type == "cuda" else None


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, as nvidia-smi shows it and ``broker.system.devices`` names it."""
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
