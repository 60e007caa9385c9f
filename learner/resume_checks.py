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

from broker.errors import ConfigError, UserError
from learner.checkpoints import checkpoint
from learner.run_folder import noted_epoch
from rlearner_text.hub import is_local, read_json, tokenizer_folder
from rlearner_text.tokenizer import Tokenizer

MODEL: Final = ("path", "seed", "tiny")  # keys of the section model that decide the first weights
# Keys of config.json that decide the shapes and meaning of the weights; the last three are GPT-2's.
SHAPES: Final = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings", "num_experts", "num_local_experts", "n_routed_experts",
    "moe_intermediate_size", "n_embd", "n_layer", "n_head",
)  # fmt: skip
NO_SHAPE: Final = ("model.seed", "model.tiny.max_position_embeddings")
MAX_CHARS: Final = 80  # of a value that is shown
OTHERWISE: Final = "a run cannot change that; choose another run.name"

Change = tuple[str, Any, Any]  # dotted key, before, after; None for a missing key


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings in a run's folder, None for a new run.

    Raises:
        UserError: if they cannot be read.
    """
    file = folder / "config.yaml"
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: expected a mapping, found {type(found).__name__}")
    return found


def changes(before: Any, after: Any, key: str = "") -> Iterator[Change]:
    """Yield the differences key by key; a mapping that only one side has is one change."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys([*before, *after]):
            yield from changes(
                before.get(name), after.get(name), f"{key}.{name}" if key else str(name)
            )
    elif before != after:
        yield key, before, after


def format_change(change: Change) -> str:
    """Return one line: ``train.lr: 1e-05 -> 2e-05``."""
    key, *values = change
    before, after = (
        text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"
        for text in map(json.dumps, values)
    )
    return f"{key}: {before} -> {after}"


def check_changes(folder: Path, config: dict[str, Any], *, force: bool) -> list[str]:
    """Return one line for each setting that differs from the folder's; none for a new run.

    Args:
        config: validated, to continue with.
        force: allow a model of the same shapes and tokenizer (the checkpoint's weights are used),
            and only new domains.

    Raises:
        UserError: if a setting changed that cannot.
    """
    before = read_settings(folder)
    if before is None:
        return []
    if (held := _held(folder)) is not None:
        _refuse_model(held, before, config, force=force)
    if noted_epoch(folder) or checkpoint.list_checkpoints(folder / "checkpoints"):
        _refuse_domains(before, config, force=force)
    return [format_change(change) for change in changes(before, config)]


def _held(folder: Path) -> Path | None:
    """Return the folder of the weights that the run resumes from, None if it has none yet."""
    places = [
        *checkpoint.list_checkpoints(folder / "checkpoints")[-1:],
        folder / "warm_start",
        folder / "model",
    ]
    return next((path for path in places if (path / "config.json").is_file()), None)


def _refuse_domains(before: dict[str, Any], after: dict[str, Any], *, force: bool) -> None:
    had = sorted(before.get("domains") or {})
    has = sorted(after.get("domains") or {})
    if had and not set(had) & set(has) and not force:
        trained = f"run {after['run']['name']} has trained {', '.join(had)}"
        allowed = f"{trained}: keep one of them, choose another run.name, or give --force"
        raise ConfigError("domains", ", ".join(has), allowed)


def _refuse_model(
    held: Path, before: dict[str, Any], after: dict[str, Any], *, force: bool
) -> None:
    model = after["model"]
    run = after["run"]["name"]
    now = _first_weights(model)
    # another version's file may lack a key
    was = {**now, **_first_weights(before.get("model") or {})}
    if now["path"] is None:
        found = list(changes(was, now, "model"))
        for key, had, value in found:
            if key not in NO_SHAPE:
                raise ConfigError(key, value, f"run {run} began with {had!r}: {OTHERWISE}")
    else:
        found = list(changes(was["path"], now["path"], "model.path"))
        if found or is_local(now["path"]):
            _refuse_shapes(held, now["path"])
            _refuse_tokenizer(
                held, now["path"], trust_remote_code=model.get("trust_remote_code", False)
            )
    if found and not force:
        key, had, value = found[0]
        allowed = f"run {run} began with {had!r}: choose another run.name, or --force to continue from {held}"
        raise ConfigError(key, value, allowed)


def _first_weights(model: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that decide the first weights, with local paths absolute."""
    found: dict[str, Any] = {key: model[key] for key in MODEL if key in model}
    if isinstance(path := found.get("path"), str) and is_local(path):
        found["path"] = str(Path(path).expanduser().absolute())
    return found


def _refuse_shapes(held: Path, path: str) -> None:
    files = (
        read_json(folder / "config.json", path, "model.path")
        for folder in (held, tokenizer_folder(path))
    )
    before, after = ({**config, **(config.get("text_config") or {})} for config in files)
    for key in SHAPES:
        if key in before and key in after and before[key] != after[key]:
            problem = f"its {key} is {after[key]}, that of {held} is {before[key]}"
            raise ConfigError("model.path", path, f"{problem}: {OTHERWISE}")


def _refuse_tokenizer(held: Path, path: str, *, trust_remote_code: bool) -> None:
    folder = tokenizer_folder(path)
    files = [one / "tokenizer.json" for one in (held, folder)]
    if all(file.is_file() for file in files) and len({file.read_bytes() for file in files}) == 1:
        return
    before, after = (
        Tokenizer.load(one, trust_remote_code=trust_remote_code).vocabulary()
        for one in (held, folder)
    )
    if before != after:
        differ = len(set(before.items()) ^ set(after.items()))
        problem = f"its tokenizer is not that of {held} ({differ} tokens differ)"
        raise ConfigError("model.path", path, f"{problem}: {OTHERWISE}")
