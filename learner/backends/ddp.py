"""Data parallelism: every rank holds the whole model and its optimizer; gradients are summed.

See ``learner.backends.ranks`` for who does what.
"""

from __future__ import annotations

from typing import ClassVar

from learner.backends.torch import TorchBackend


class DdpBackend(TorchBackend):
    """See ``learner.backends.base.Backend``."""

    takes_ranks: ClassVar[bool] = True
