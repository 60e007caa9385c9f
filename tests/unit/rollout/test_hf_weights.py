"""New weights of a transformers model: taken over without a copy where they can be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from broker.errors import TransferFailed
from rollout.engines.hf.weights import HeldWeights


class Tied(torch.nn.Module):
    """Two names of one parameter, two parameters in one memory, a buffer, and one that is not
    stored.
    """

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.one = torch.nn.Parameter(torch.zeros(4))
        self.other = torch.nn.Parameter(self.one.data)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_tied_ones_count_once_and_change_together() -> None:
    module = Tied()
    held = HeldWeights(module)
    assert list(held.tensors()) == ["one", "embed.weight", "scale"]
    new = {name: torch.randn_like(tensor) for name, tensor in held.tensors().items()}
    held.load(new)
    assert module.head.weight is module.embed.weight
    assert module.head.weight.data_ptr() == new["embed.weight"].data_ptr()
    assert module.one.data_ptr() == module.other.data_ptr() == new["one"].data_ptr()
    assert module.scale.data_ptr() == new["scale"].data_ptr()
    assert all(held.tensors()[name].data_ptr() == tensor.data_ptr() for name, tensor in new.items())
    assert isinstance(module.one, torch.nn.Parameter)


def test_another_dtype_or_layout_is_copied() -> None:
    module = Tied()
    held = HeldWeights(module)
    before = {name: tensor.data_ptr() for name, tensor in held.tensors().items()}
    new = {
        "one": torch.arange(4, dtype=torch.float64),
        "embed.weight": torch.randn(3, 5).T,
        "scale": torch.full((2,), 7.0),
    }
    held.load(new)
    for name, tensor in held.tensors().items():
        assert torch.equal(tensor, new[name].to(tensor.dtype))
        assert (tensor.data_ptr() == before[name]) == (name != "scale")
    new["embed.weight"].zero_()
    assert held.tensors()["embed.weight"].abs().sum() > 0


def test_what_does_not_fit_changes_nothing() -> None:
    module = Tied()
    held = HeldWeights(module)
    before = module.one.data_ptr()
    good = {name: torch.randn_like(tensor) for name, tensor in held.tensors().items()}
    with pytest.raises(TransferFailed, match="scale has shape"):
        held.load({**good, "scale": torch.zeros(3)})
    assert module.one.data_ptr() == before


def test_mappings_that_compute_their_tensors_are_asked_once_for_each() -> None:
    held = HeldWeights(Tied())
    asked: list[str] = []

    class Computing(Mapping[str, torch.Tensor]):
        def __iter__(self) -> Iterator[str]:
            return iter(held.tensors())

        def __len__(self) -> int:
            return len(held.tensors())

        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return torch.zeros_like(held.tensors()[name])

    held.load(Computing())
    assert sorted(asked) == sorted(held.tensors())
