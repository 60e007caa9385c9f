"""Weights computed on access, so that an engine that copies never needs the whole model twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class OnDemand(Mapping[str, Tensor]):
    """A whole model by name, parts of which are computed each time they are read.

    Attributes:
        base: the same names with tensors of the same shapes, for callers that only need these.
    """

    base: Mapping[str, Tensor]

    def made(self) -> dict[str, Tensor]:
        """Compute all of them now, once."""
        return {name: self[name] for name in self}

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)
