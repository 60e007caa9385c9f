"""Which tensor is named as not finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.weights.finite import first_non_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_first_by_name_with_its_place_and_count(dtype: torch.dtype, value: float) -> None:
    tensors = {
        "a": torch.ones(3, 4, dtype=dtype),
        "b": torch.ones(2, 5, dtype=dtype),
        "c": torch.ones(6, dtype=dtype),
    }
    assert first_non_finite(tensors) == ""
    tensors["c"][0] = value
    tensors["b"][1, 2:4] = value
    assert (
        first_non_finite(tensors)
        == f"b holds {value} at [1, 2] (2 of its 10 values are not finite)"
    )


def test_tensors_without_such_values_are_passed_over() -> None:
    tensors = {
        "ids": torch.arange(4),
        "empty": torch.zeros(0),
        "meta": torch.empty(3, device="meta"),
        "fp8": torch.full((2,), torch.nan).to(torch.float8_e4m3fn),
        "mask": torch.ones(2, dtype=torch.bool),
        "largest": torch.full((2,), torch.finfo(torch.float32).max),
        "scalar": torch.tensor(1.0),
    }
    assert first_non_finite(tensors) == ""
    tensors["scalar"] = torch.tensor(torch.nan)
    assert first_non_finite(tensors) == "scalar holds nan at [] (1 of its 1 values are not finite)"


@given(
    st.lists(st.floats(width=32), max_size=20),
    st.lists(st.floats(width=32), min_size=1, max_size=20),
)
def test_as_elementwise(first: list[float], second: list[float]) -> None:
    tensors = {"first": torch.tensor(first), "second": torch.tensor(second)}
    broken = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    assert first_non_finite(tensors).partition(" ")[0] == (broken[0] if broken else "")
