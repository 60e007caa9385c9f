"""The operator's command ``rlearner``, and its use from Python: ``Run`` and ``train``.

May import ``learner`` and what both share; no role imports it. The names of Python are loaded when
they are first used, because every command imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from broker.errors import UserError
    from rlearner.api.run import Run
    from rlearner.api.training import train

__all__ = ["Run", "UserError", "train"]

_MODULES: Final = {
    "Run": "rlearner.api.run",
    "UserError": "broker.errors",
    "train": "rlearner.api.training",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
