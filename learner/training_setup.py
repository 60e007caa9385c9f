"""Opens the training thread of a configuration, for learners and replays; needs no broker."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError
from broker.runtime.shared_devices import SharedDevices
from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings
from broker.telemetry.operator_profile import ProfilePlan
from learner.algorithm.advantages import ADVANTAGES
from learner.backends import BACKENDS
from learner.training import TrainingThread
from learner.turns import DeviceTurns
from rlearner_text.transformers_import import import_transformers

# Imports that take long and would otherwise happen during the first steps.
SLOW_MODULES: Final = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "learner.reporting.trackers.tensorboard",
)


def begin_imports(backend: str) -> None:
    """Start importing a training backend in a background thread: it takes seconds."""
    asyncio.get_running_loop().run_in_executor(None, _preload_backend, backend)


def _preload_backend(backend: str) -> None:
    # ``open_training`` raises the error again.
    with suppress(ConfigError, ImportError):
        _import_backend(backend)


def _import_backend(backend: str) -> Any:
    """Return the backend's class, imported with all that it needs.

    Raises:
        ConfigError: if there is no such backend.
    """
    with _without_collection():
        import_transformers()
        backend_class = resolve("backends", backend, BACKENDS)
        for name in SLOW_MODULES:
            import_module(name)
    _freeze_objects()
    return backend_class


async def open_training(
    settings: RunSettings,
    model_path: str,
    first_path: str,
    *,
    devices: SharedDevices | None = None,
    folder: Path = Path(),
    record_tokens: bool = False,
    seed: int | None = None,
    profile: ProfilePlan | None = None,
) -> TrainingThread:
    """Build the backend of a run's configuration in the training thread; the caller closes it.

    Args:
        model_path: the weights to continue from: a checkpoint's folder, or the first ones.
        first_path: the weights that the run began with, source of the reference and the tokenizer.
        devices: to take turns on with other processes.
        folder: where the model goes in their turns, if it is in host memory.
        record_tokens: record entropy and importance ratio of each trained token.
        seed: of the rules that the log begins with; None: of the configuration.
        profile: the steps whose operators are recorded.

    Raises:
        ConfigError: if the backend refuses the configuration, or cannot take turns.
    """
    train = settings.train
    algorithm = settings.algorithm
    max_length = max(domain.max_context_tokens for domain in settings.trained_domains.values())
    model = settings.model
    backend_class = await asyncio.to_thread(_import_backend, train.backend)
    build = partial(
        backend_class,
        model_path,
        train=train,
        algorithm=algorithm,
        model=model,
        seed=settings.run.seed if seed is None else seed,
        ref_path=first_path,
        max_length=max_length,
        max_context=settings.rollout.max_context_tokens,
    )
    if settings.rollout.exact:
        # Other backends need not know it: ``check`` refuses them.
        build = partial(build, exact=True)
    estimator = resolve("advantages", algorithm.adv_estimator, ADVANTAGES)
    if devices is not None and not getattr(backend_class, "offloads", False):
        raise ConfigError("train.backend", train.backend, "torch, ddp or fsdp2 with --share-gpus")
    turns = DeviceTurns(devices, folder) if devices is not None else None
    stream = train.streaming != "never" and turns is None
    training = TrainingThread(
        build,
        estimator,
        algorithm,
        stream=stream,
        turns=turns,
        record_tokens=record_tokens,
        profile=profile,
    )
    try:
        await training.open()
    except BaseException:
        await asyncio.to_thread(training.close)
        raise
    return training


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection, which scans the 600,000 new objects of imports in vain."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _freeze_objects() -> None:
    """Exclude the imported objects from garbage collection while training."""
    gc.freeze()
