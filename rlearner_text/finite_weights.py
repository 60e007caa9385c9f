"""Names the tensor, and the file, by which a model's weights are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from broker.weights.finite import first_non_finite


def weights_problem(tensors: Mapping[str, Tensor], folder: str | Path) -> str:
    """Return which weight of a loaded model holds NaN or infinity; empty if none does.

    Args:
        tensors: of the loaded model.
        folder: with the safetensors files that they come from.
    """
    if not (name_loaded := first_non_finite(tensors)):
        return ""
    for path in sorted(Path(folder).glob("*.safetensors")):
        if name_stored := _first_in_file(path):
            return f"{path.name}: {name_stored}"
    dtype = next(iter(tensors.values())).dtype
    return (
        f"{name_loaded}; its file holds only finite values, which do not fit "
        f"{str(dtype).removeprefix('torch.')}"
    )


def _first_in_file(path: Path) -> str:
    """Return the first tensor of a file that is not finite, reading one at a time."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            if problem := first_non_finite({name: file.get_tensor(name)}):
                return problem
    return ""
