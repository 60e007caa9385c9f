"""CUDA IPC without a GPU: that the driver is called as its reference says, and what is said where
it refuses; not what it then does.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from broker.weights.memory import cuda
from broker.weights.memory.cuda import FUNCTIONS, CudaDevice, CudaDriver, device_of, name_of
from broker.weights.memory.devices import MemoryCard
from broker.weights.memory.shared import segment_of
from broker.weights.memory.staging import plan_of
from broker.weights.protocol.session import TransferSettings
from broker.weights.sender.send import WeightSender
from learner.backends.models import policy
from rollout.engines.hf import model

HANDLE = bytes(range(64))
UNIT = bytes.fromhex("0123456789abcdef0123456789abcdef")


class Library:
    """Functions behind C pointers of the declared types, so that arguments travel as they would to
    the driver; ``fails`` names some.
    """

    def __init__(self, **fails: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fails, self._names = (
            fails,
            {2: b"CUDA_ERROR_OUT_OF_MEMORY", 801: b"CUDA_ERROR_NOT_SUPPORTED"},
        )
        for name, types in FUNCTIONS.items():
            setattr(self, name, ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._answering(name)))

    def _answering(self, name: str) -> Callable[..., int]:
        def answer(*arguments: Any) -> int:
            if name == "cuGetErrorName":
                if arguments[0] not in self._names:
                    return 1
                arguments[1][0] = self._names[arguments[0]]
                return 0
            self.calls.append(
                (
                    name,
                    *(
                        self._seen(argument)
                        for argument in arguments
                        if not hasattr(argument, "contents")
                    ),
                )
            )
            if name in self._fails:
                return self._fails[name]
            out = arguments[0]
            if name == "cuDeviceGet":
                out[0] = arguments[1] + 10  # a driver's own numbers may be any
            elif name == "cuDeviceGetUuid_v2":
                out[0][:] = UNIT
            elif name == "cuDevicePrimaryCtxRetain":
                out[0] = 0xC0 + arguments[1]
            elif name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2"):
                out[0] = 0x7F00_0000_0000
            elif name == "cuIpcGetMemHandle":
                out[0].reserved[:] = HANDLE
            return 0

        return answer

    def _seen(self, argument: Any) -> Any:
        return bytes(argument.reserved) if hasattr(argument, "reserved") else argument


def test_the_driver_is_called_as_its_reference_says_in_torchs_context() -> None:
    library = Library()
    driver = CudaDriver(library)
    assert driver.unit(0) == UNIT
    assert driver.allocate(1, 3 << 30) == 0x7F00_0000_0000
    assert driver.export(1, 0x7F00_0000_0000) == HANDLE
    assert driver.open(1, HANDLE) == 0x7F00_0000_0000
    driver.close(1, 0x7F00_0000_0000)
    driver.free(1, 0x7F00_0000_0000)
    within = [("cuCtxPushCurrent_v2", 0xC0 + 11), ("cuCtxPopCurrent_v2",)]
    assert library.calls == [
        ("cuInit", 0),
        ("cuDeviceGet", 0), ("cuDeviceGetUuid_v2", 10),
        ("cuDeviceGet", 1), ("cuDevicePrimaryCtxRetain", 11),  # once
        within[0], ("cuMemAlloc_v2", 3 << 30), within[1],
        within[0], ("cuIpcGetMemHandle", 0x7F00_0000_0000), within[1],
        within[0], ("cuIpcOpenMemHandle_v2", HANDLE, 1), within[1],
        within[0], ("cuIpcCloseMemHandle", 0x7F00_0000_0000), within[1],
        within[0], ("cuMemFree_v2", 0x7F00_0000_0000), within[1],
    ]  # fmt: skip


@pytest.mark.parametrize(("code", "said"), [(2, "CUDA_ERROR_OUT_OF_MEMORY"), (4711, "error 4711")])
def test_what_the_driver_answers_is_said_in_one_line(code: int, said: str) -> None:
    library = Library(cuMemAlloc_v2=code)
    with pytest.raises(OSError, match=rf"cuMemAlloc_v2: {said}$"):
        CudaDriver(library).allocate(0, 1)
    assert library.calls[-1] == ("cuCtxPopCurrent_v2",)  # the thread has its own context again


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(OSError, match="libno-such-driver"):
        CudaDriver()
    with pytest.raises(OSError, match="has no function cuInit: the driver is too old"):
        CudaDriver(object())
    with pytest.raises(OSError, match="cuInit: error 100"):
        CudaDriver(Library(cuInit=100))


def test_a_handle_of_a_hidden_gpu_or_of_no_gpu_is_not_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    library = Library()
    mine = CudaDevice("cuda:0", CudaDriver(library))
    with pytest.raises(
        OSError,
        match=r"GPU-ffffffff-ffff-ffff-ffff-ffffffffffff is hidden from this process, see CUDA_VISIBLE_DEVICES$",
    ):
        mine.open(MemoryCard("cuda", b"\xff" * 16, 4096, HANDLE))
    with pytest.raises(OSError, match="a handle of 63 bytes is not a CUDA handle"):
        mine.open(MemoryCard("cuda", UNIT, 4096, HANDLE[1:]))
    assert "cuIpcOpenMemHandle_v2" not in {call[0] for call in library.calls}
    assert name_of(UNIT) == "GPU-01234567-89ab-cdef-0123-456789abcdef"


def test_memory_that_torch_cannot_take_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose torch would believe in the address")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    library = Library()
    with pytest.raises(OSError, match="CUDA"):
        CudaDevice("cuda:0", CudaDriver(library)).open(MemoryCard("cuda", UNIT, 4096, HANDLE))
    gc.collect()
    names = [call[0] for call in library.calls]
    assert names.index("cuIpcOpenMemHandle_v2") < names.index("cuIpcCloseMemHandle")


def test_a_gpu_that_has_none_to_share_leaves_host_memory(caplog: pytest.LogCaptureFixture) -> None:
    library = Library(cuIpcGetMemHandle=801)
    with caplog.at_level(logging.WARNING):
        segment = segment_of(
            plan_of({"a": torch.zeros(100)}, 1), CudaDevice("cuda:0", CudaDriver(library))
        )
    assert segment is not None
    assert segment.device == torch.device("cpu")
    said = "weights: servers of this host read host memory, because the device has none to share: "
    assert [record.message for record in caplog.records] == [
        f"{said}cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"
    ]
    # of two buffers of a page, for it is shared in whole blocks
    assert ("cuMemAlloc_v2", 2 << 20) in library.calls
    assert library.calls[-2] == ("cuMemFree_v2", 0x7F00_0000_0000)  # nobody was told of it


def test_only_weights_on_a_gpu_are_read_there() -> None:
    assert device_of(torch.device("cpu")) is None
    # asks nothing of the driver yet
    assert isinstance(device_of(torch.device("cuda:1")), CudaDevice)


def test_a_gpu_has_a_number_wherever_a_thread_selects_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device refuses a plain ``cuda``, and --gpus sets train.device to it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cuda.numbered("cuda") == torch.device("cuda", 0)
    assert cuda.numbered("cuda:1") == torch.device("cuda", 1)
    assert cuda.numbered("cpu") == torch.device("cpu")
    devices = [policy.pick_device("auto"), policy.pick_device("cuda"), policy.pick_device("cuda:1")]
    assert [
        device.index for device in (*devices, model.pick_device("cuda"), model.pick_device("auto"))
    ] == [
        0,
        0,
        1,
        0,
        0,
    ]
    settings = TransferSettings(("gloo",))
    sender = WeightSender(
        None, plan_of({"w": torch.zeros(2)}, 1), epoch=1, settings=settings, device="cuda"
    )  # type: ignore[arg-type]
    assert sender._gpu == torch.device("cuda", 0)
