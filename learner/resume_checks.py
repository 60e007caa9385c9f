"""Compares the settings of a resumed run to those it has; refuses those that cannot change.

A run's model and tokenizer are fixed by its first weights: every checkpoint, every ticket and every
sampled token depends on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from broker.contract.wire import PlainSettings
from broker.errors import ConfigError, UserError
from broker.settings.run_settings import RunSettings
from learner.checkpoints import checkpoint
from learner.credit.dataset_record import check_datasets
from learner.prepare import refuse_fewer_steps, run_folder
from learner.run_folder import noted_epoch
from rlearner_text.hub import is_local, read_json, tokenizer_folder
from rlearner_text.tokenizer import Tokenizer

# Keys of the section model that decide the first weights.
MODEL: Final = ("path", "seed", "tiny")
# Keys of config.json that decide the shapes and meaning of the weights; GPT-2's are the last three.
SHAPES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "n_embd", "n_layer", "n_head",
)  # fmt: skip
NO_SHAPE: Final = ("model.seed", "model.tiny.max_position_embeddings")
# Longer values are cut in messages.
MAX_CHARS: Final = 80
FIXED_ADVICE: Final = "a run cannot change that; choose another run.name"

# Dotted key, old and new value; None for a missing key.
Change = tuple[str, Any, Any]


def read_settings(folder: Path) -> PlainSettings | None:
    """Return the settings in a run's folder, None for a new run.

    Raises:
        UserError: if they cannot be read.
    """
    file = folder / "config.yaml"
    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file}: expected a mapping, found {type(settings).__name__}")
    return settings


def setting_changes(old: Any, new: Any, key: str = "") -> Iterator[Change]:
    """Yield the differences key by key; a mapping that only one side has is one change."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from setting_changes(
                old.get(name), new.get(name), f"{key}.{name}" if key else str(name)
            )
    elif old != new:
        yield key, old, new


def format_change(change: Change) -> str:
    """Return one line: ``train.lr: 1e-05 -> 2e-05``."""
    key, *values = change
    old, new = (
        text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
        for text in map(json.dumps, values)
    )
    return f"{key}: {old} -> {new}"


def check_continuing(settings: RunSettings, *, force: bool) -> list[str]:
    """Check that a run can go on with these settings; return what changed, as ``check_changes``.

    ``rlearner check``, ``up`` and ``start`` call it.

    Args:
        settings: validated, with ``run.name`` set.

    Raises:
        UserError: if the run has made more steps, or a setting changed that cannot.
    """
    folder = run_folder(settings.run)
    refuse_fewer_steps(folder, str(settings.run.name), settings.train.steps)
    return check_changes(folder, settings, force=force)


def check_changes(folder: Path, settings: RunSettings, *, force: bool) -> list[str]:
    """Return one line for each setting or data set that differs from the folder's; none for a new
    run.

    Args:
        settings: validated, to continue with.
        force: allow a model of the same shapes and tokenizer (the checkpoint's weights are used),
            only new domains, and other data.

    Raises:
        UserError: if a setting changed that cannot, or the data did.
    """
    old_config = read_settings(folder)
    if old_config is None:
        return []
    if (weights_folder := _find_weights(folder)) is not None:
        _refuse_model(weights_folder, old_config, settings, force=force)
    if noted_epoch(folder) or checkpoint.list_checkpoints(folder / "checkpoints"):
        _refuse_domains(old_config, settings, force=force)
    data_changes = check_datasets(folder, settings, old_config, force=force)
    changes = setting_changes(old_config, settings.to_plain())
    return [*data_changes, *(format_change(change) for change in changes)]


def _find_weights(folder: Path) -> Path | None:
    """Return the folder of the weights that the run resumes from, None if it has none yet."""
    places = [
        *checkpoint.list_checkpoints(folder / "checkpoints")[-1:],
        folder / "warm_start",
        folder / "model",
    ]
    return next((path for path in places if (path / "config.json").is_file()), None)


def _refuse_domains(old_config: PlainSettings, settings: RunSettings, *, force: bool) -> None:
    old_sections = old_config.get("domains") or {}
    old_domains = sorted(name for name in old_sections if old_sections[name].get("weight", 1))
    new_domains = sorted(settings.trained_domains)
    if old_domains and not set(old_domains) & set(new_domains) and not force:
        history = f"run {settings.run.name} has trained {', '.join(old_domains)}"
        allowed = f"{history}: keep one of them, choose another run.name, or give --force"
        raise ConfigError("domains", ", ".join(new_domains), allowed)


def _refuse_model(
    weights_folder: Path, old_config: PlainSettings, settings: RunSettings, *, force: bool
) -> None:
    model = settings.model
    run = settings.run.name
    new_model = _first_weights(model.to_plain())
    # The file of another version may lack a key.
    old_model = {**new_model, **_first_weights(old_config.get("model") or {})}
    if model.path is None:
        model_changes = list(setting_changes(old_model, new_model, "model"))
        for key, old_value, value in model_changes:
            if key not in NO_SHAPE:
                raise ConfigError(key, value, f"run {run} began with {old_value!r}: {FIXED_ADVICE}")
    else:
        path: str = new_model["path"]
        model_changes = list(setting_changes(old_model["path"], path, "model.path"))
        if model_changes or is_local(path):
            _refuse_shapes(weights_folder, path)
            _refuse_tokenizer(weights_folder, path, trust_remote_code=model.trust_remote_code)
    if model_changes and not force:
        key, old_value, value = model_changes[0]
        allowed = (
            f"run {run} began with {old_value!r}: choose another run.name, or --force to continue "
            f"from {weights_folder}"
        )
        raise ConfigError(key, value, allowed)


def _first_weights(model: PlainSettings) -> PlainSettings:
    """Return the settings that decide the first weights, with local paths absolute."""
    values: PlainSettings = {key: model[key] for key in MODEL if key in model}
    if isinstance(path := values.get("path"), str) and is_local(path):
        values["path"] = str(Path(path).expanduser().absolute())
    return values


def _refuse_shapes(weights_folder: Path, path: str) -> None:
    files = (
        read_json(folder / "config.json", path, "model.path")
        for folder in (weights_folder, tokenizer_folder(path))
    )
    old_sizes, new_sizes = ({**config, **(config.get("text_config") or {})} for config in files)
    for key in SHAPES:
        if key in old_sizes and key in new_sizes and old_sizes[key] != new_sizes[key]:
            problem = f"its {key} is {new_sizes[key]}, that of {weights_folder} is {old_sizes[key]}"
            raise ConfigError("model.path", path, f"{problem}: {FIXED_ADVICE}")


def _refuse_tokenizer(weights_folder: Path, path: str, *, trust_remote_code: bool) -> None:
    folder = tokenizer_folder(path)
    files = [place / "tokenizer.json" for place in (weights_folder, folder)]
    if all(file.is_file() for file in files) and len({file.read_bytes() for file in files}) == 1:
        return
    old_vocabulary, new_vocabulary = (
        Tokenizer.load(place, trust_remote_code=trust_remote_code).vocabulary()
        for place in (weights_folder, folder)
    )
    if old_vocabulary != new_vocabulary:
        num_different = len(set(old_vocabulary.items()) ^ set(new_vocabulary.items()))
        problem = f"its tokenizer is not that of {weights_folder} ({num_different} tokens differ)"
        raise ConfigError("model.path", path, f"{problem}: {FIXED_ADVICE}")
