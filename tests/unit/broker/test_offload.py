"""Tensors come back with the same bytes and share memory as before; in between their memory is the
system's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from broker.weights.memory.offload import OffloadedMemory

MIB = 1 << 20


def _anonymous() -> int:
    """Return this process's resident bytes that are not of files."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _mapped(folder: Path) -> torch.Tensor:
    """A tensor mapped from a file, as safetensors may be; torch cannot resize it."""
    (folder / "mapped").write_bytes(bytes(range(64)) * 64)
    return torch.from_file(str(folder / "mapped"), shared=False, size=1024, dtype=torch.float32)


def _shown(_: Path) -> torch.Tensor:
    """A tensor that was shown as a numpy array; torch no longer resizes it."""
    made = torch.randn(64, 16)
    assert made.numpy() is not None
    assert not made.untyped_storage().resizable()
    return made


@pytest.mark.parametrize(
    "make", [_mapped, _shown, lambda _: torch.randn(64, 16), lambda _: torch.arange(7)]
)
def test_the_bytes_come_back_and_are_shared_as_before(
    make: Callable[[Path], torch.Tensor], tmp_path: Path
) -> None:
    tensor = make(tmp_path)
    parameter, part = torch.nn.Parameter(tensor.double()), tensor.flatten()[1:5]
    moved = OffloadedMemory(tmp_path)
    before = [one.detach().clone() for one in (tensor, parameter, part)]
    for _ in range(2):
        size = sum(one.untyped_storage().nbytes() for one in (tensor, parameter))
        assert moved.release([tensor, part, parameter]) == size
        assert tensor.untyped_storage().nbytes() == parameter.untyped_storage().nbytes() == 0
        assert tensor.shape == before[0].shape
        moved.restore()
        for one, expected in zip((tensor, parameter, part), before, strict=True):
            assert torch.equal(one, expected)
        tensor.flatten()[1] = 3
        assert part[0] == 3
        tensor.flatten()[1] = before[0].flatten()[1]
    assert list(tmp_path.glob("tmp*")) == []  # its file has no name


def test_the_memory_is_returned_to_the_system() -> None:
    before, tensors = _anonymous(), [torch.ones(1 << 18) for _ in range(64)]  # 64 MiB
    moved = OffloadedMemory()
    assert _anonymous() - before > 60 * MIB
    assert moved.release(tensors) == 64 * MIB
    assert _anonymous() - before < 4 * MIB
    moved.restore()
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_tensors_stay_if_the_file_cannot_be_written(tmp_path: Path) -> None:
    tensor = torch.arange(1000)
    moved = OffloadedMemory(tmp_path / "missing")
    with pytest.raises(FileNotFoundError):
        moved.release([tensor])
    assert torch.equal(tensor, torch.arange(1000))
    moved.restore()
    assert torch.equal(tensor, torch.arange(1000))
