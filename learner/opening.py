"""From a configuration to a thread that trains: what a learner and a replay have in common. Needs no broker."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.registry import resolve
from broker.settings.runspec import domains, section
from learner.algorithm.advantages import ADVANTAGES
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from learner.training import Training
from rlearner_text.config import ModelSection
from rlearner_text.library import import_transformers

HEAVY: Final = ("transformers.models.auto.modeling_auto", "transformers.modeling_utils", "learner.reporting.trackers.tensorboard")


def begin_imports(config: dict[str, Any]) -> None:
    """Import what training will need in a thread of its own, for it takes seconds; ``open_training`` takes up what is there then."""
    asyncio.get_running_loop().run_in_executor(None, _try_libraries, section(config, "train", TrainSection).backend)


def _try_libraries(backend: str) -> None:
    with suppress(ConfigError, ImportError):  # whoever opens training will say it
        _libraries(backend)


def _libraries(backend: str) -> Any:
    """The backend's class, imported with all that it will need.

    Raises:
        ConfigError: no such backend.
    """
    with _collecting_later():
        import_transformers()
        found = resolve("backends", backend, BACKENDS)
        for name in HEAVY:
            import_module(name)
    _freeze()
    return found


async def open_training(config: dict[str, Any], model_path: str, first_path: str) -> Training:
    """Build the backend that a run's configuration asks for, in a thread of its own; to be closed by the caller.

    Args:
        config: validated.
        model_path: the weights to go on from: a checkpoint's folder, or the first ones.
        first_path: the weights that the run began with; the reference and the tokenizer come from there.

    Raises:
        ConfigError: what the backend refuses.
    """
    train, algorithm = section(config, "train", TrainSection), section(config, "algorithm", AlgorithmSection)
    table = domains(config)
    backend = await asyncio.to_thread(_libraries, train.backend)
    build = partial(
        backend,
        model_path,
        train=train,
        algorithm=algorithm,
        model=section(config, "model", ModelSection),
        seed=config["run"]["seed"],
        ref_path=first_path,
        max_length=max(domain.max_context_tokens for domain in table.values()),
    )
    training = Training(
        build,
        resolve("advantages", algorithm.adv_estimator, ADVANTAGES),
        algorithm,
        stream=train.streaming != "never",
    )
    try:
        await training.open()
    except BaseException:
        await asyncio.to_thread(training.close)
        raise
    return training


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Imports make some 600,000 objects that stay: looking for garbage among them costs a fifth of the start."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@cache
def _freeze() -> None:
    """Nor are they looked at again while training."""
    gc.freeze()
