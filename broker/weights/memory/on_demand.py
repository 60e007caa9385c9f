"""Weights that are computed when they are asked for, so that the whole model is never held twice on the way to an
engine that copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


class OnDemand(Mapping[str, Tensor]):
    """A whole model by name, some of it computed each time it is read.

    Attributes:
        base: the same names with tensors of the same shapes, for who only looks at these.
    """

    base: Mapping[str, Tensor]

    def made(self) -> dict[str, Tensor]:
        """All of them, computed now and once."""
        return {name: self[name] for name in self}

    def __iter__(self) -> Iterator[str]:
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)
