"""Import paths of version 0.1, which plug-ins may use until version 0.3 with a warning.

An import of this module installs the finder. ``broker`` imports it, and so, through ``broker``,
does every package whose modules have old names.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import MethodType, ModuleType
from typing import Any, Final

# Modules that moved, with everything below them.
MOVED: Final[Mapping[str, str]] = {
    "broker.config": "broker.settings.config",
    "broker.streams": "broker.contract.streams",
    "broker.wire": "broker.contract.wire",
    "learner.advantages": "learner.algorithm.advantages",
    "learner.filters": "learner.algorithm.filters",
    "learner.losses": "learner.algorithm.losses",
    "learner.trackers": "learner.reporting.trackers",
}
# New names by old names, of today's modules.
RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "broker.channel.carriers": {
        "Channel": "RequestChannel",
        "connect": "make_client",
        "serve": "make_server",
    },
    "broker.contract.streams": {"Kind": "StreamKind", "token": "check_token"},
    "learner.algorithm.advantages.base": {
        "Estimate": "AdvantageEstimate",
        "Estimator": "AdvantageEstimator",
        "Row": "BatchRow",
        "discounted": "discounted_returns",
        "spread": "spread_over_tokens",
        "whiten": "whiten_arrays",
    },
    "learner.algorithm.losses.base": {
        "Loss": "PolicyLoss",
        "Tokens": "LossTokens",
        "ratio": "clamped_ratio",
    },
    "learner.algorithm.losses.preference": {"Pairs": "PairLogprobs"},
    "learner.reporting.trackers": {"flatten": "flatten_settings"},
    "rewardhub.bounded": {"Bounded": "BoundedFunction"},
    "rewardhub.rewards.base": {"InvalidValue": "InvalidScoreError", "Reward": "RewardProtocol"},
    "rollout.engines.base": {
        "Output": "GenerationOutput",
        "Stats": "EngineStats",
        "TappedEngine": "StreamingEngine",
        "problem": "request_problem",
    },
}


class OldImportFinder(MetaPathFinder, Loader):
    """Imports a module that moved under its old name, as the same module, and adds the old names
    of what a module holds.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to import a module that has an old name; None for every other module."""
        if _new_path(fullname):
            return ModuleSpec(fullname, self)
        spec = PathFinder.find_spec(fullname, path) if fullname in RENAMED else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RenamingLoader(fullname, spec.loader.path)
        return spec

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes from there what it returns and what it sets in the package.
        sys.modules[module.__name__] = importlib.import_module(_new_path(module.__name__))
        _warn_of_old(module.__name__, _new_path(module.__name__))


class RenamingLoader(SourceFileLoader):
    """Loads a module and lets it answer to old names.

    The modules have no ``__getattr__`` in their source, so type checkers refuse old names.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        # Python calls it for a name that the module lacks.
        vars(module)["__getattr__"] = MethodType(_find_name, module)


def _new_path(module: str) -> str:
    # Empty for a module that did not move.
    return next(
        (
            MOVED[old] + module.removeprefix(old)
            for old in MOVED
            if module == old or module.startswith(f"{old}.")
        ),
        "",
    )


def _find_name(module: ModuleType, name: str) -> Any:
    if name not in RENAMED[module.__name__]:
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
    new = RENAMED[module.__name__][name]
    _warn_of_old(f"{module.__name__}.{name}", f"{module.__name__}.{new}")
    return getattr(module, new)


def _warn_of_old(old: str, new: str) -> None:
    # Python shows this category by default, also where a worker process imports a plug-in. The
    # level leads to the import: frames of the import system do not count.
    warnings.warn(f"{old} is now {new}; the old name ends with 0.3", FutureWarning, stacklevel=3)


# The finder is the first: the next one would import a module below a moved package a second time,
# with classes of its own.
sys.meta_path.insert(0, OldImportFinder())
