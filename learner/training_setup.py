"""Opens the training thread that a configuration describes, for learners and replays; needs no
broker.
"""

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
from broker.settings.runspec import domains, section
from learner.algorithm.advantages import ADVANTAGES
from learner.backends import BACKENDS
from learner.config import AlgorithmSection, TrainSection
from learner.training import TrainingThread
from learner.turns import DeviceTurns
from rlearner_text.config import ModelSection
from rlearner_text.transformers_import import import_transformers

HEAVY: Final = (
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "learner.reporting.trackers.tensorboard",
)


def begin_imports(config: dict[str, Any]) -> None:
    """Start importing the training libraries in a background thread: it takes seconds."""
    asyncio.get_running_loop().run_in_executor(
        None, _try_libraries, section(config, "train", TrainSection).backend
    )


def _try_libraries(backend: str) -> None:
    with suppress(ConfigError, ImportError):  # open_training raises it again
        _libraries(backend)


def _libraries(backend: str) -> Any:
    """Return the backend's class, imported with all that it needs.

    Raises:
        ConfigError: if there is no such backend.
    """
    with _collecting_later():
        import_transformers()
        found = resolve("backends", backend, BACKENDS)
        for name in HEAVY:
            import_module(name)
    _freeze()
    return found


async def open_training(
    config: dict[str, Any],
    model_path: str,
    first_path: str,
    *,
    devices: SharedDevices | None = None,
    folder: Path = Path(),
    record_tokens: bool = False,
    seed: int | None = None,
) -> TrainingThread:
    """Build the backend of a run's configuration in the training thread; the caller closes it.

    Args:
        config: validated.
        model_path: the weights to continue from: a checkpoint's folder, or the first ones.
        first_path: the weights that the run began with, source of the reference and the tokenizer.
        devices: to take turns on with other processes.
        folder: where the model goes in their turns, if it is in host memory.
        record_tokens: record entropy and importance ratio of each trained token.
        seed: of the rules that the log begins with; None: of the configuration.

    Raises:
        ConfigError: if the backend refuses the configuration, or cannot take turns.
    """
    train = section(config, "train", TrainSection)
    algorithm = section(config, "algorithm", AlgorithmSection)
    most = max(domain.max_context_tokens for domain in domains(config).values())
    model = section(config, "model", ModelSection)
    kind = await asyncio.to_thread(_libraries, train.backend)
    build = partial(
        kind,
        model_path,
        train=train,
        algorithm=algorithm,
        model=model,
        seed=config["run"]["seed"] if seed is None else seed,
        ref_path=first_path,
        max_length=most,
        max_context=config["rollout"]["max_context_tokens"],
    )
    estimator = resolve("advantages", algorithm.adv_estimator, ADVANTAGES)
    if devices is not None and not getattr(kind, "offloads", False):
        raise ConfigError("train.backend", train.backend, "torch, ddp or fsdp2 with --share-gpus")
    turns = DeviceTurns(devices, folder) if devices is not None else None
    stream = train.streaming != "never" and turns is None
    training = TrainingThread(
        build, estimator, algorithm, stream=stream, turns=turns, record_tokens=record_tokens
    )
    try:
        await training.open()
    except BaseException:
        await asyncio.to_thread(training.close)
        raise
    return training


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Disable garbage collection: scanning the 600,000 objects that imports create costs a fifth of
    the start.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@cache
def _freeze() -> None:
    """Exclude the imported objects from garbage collection while training."""
    gc.freeze()
