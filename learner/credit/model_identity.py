"""Identifies the model that a run begins with, so that pass rates of another are not taken for its.

Weights are not read whole: a file is known by its size and by parts of its beginning, middle and
end, in which any two trainings of a model differ.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from broker.errors import UserError
from learner.config import WarmStartSection
from rlearner_text.config import ModelSection

SAMPLED_BYTES: Final = 2**16
WEIGHTS: Final = (".safetensors", ".bin")


@dataclass(frozen=True)
class ModelIdentity:
    """A model's name for people, and a digest that only equal models share."""

    name: str
    digest: str


def identify_model(model: ModelSection, warm_start: WarmStartSection) -> ModelIdentity:
    """Return the identity of a run's first weights, which need not exist yet.

    A name on the hub stands for its files. A warm start is part of the identity.

    Raises:
        UserError: if a file of the model cannot be read.
    """
    parts: list[str] = []
    if warm_start.steps:
        parts.append(json.dumps(warm_start.model_dump(mode="json"), sort_keys=True))
    folder = Path(model.path or "").expanduser()
    if model.path is None:
        name = "the model of model.tiny"
        parts.append(json.dumps(model.tiny.model_dump(mode="json"), sort_keys=True))
        parts.append(str(model.seed))
    elif folder.is_dir():
        name = folder.resolve().name
        parts += _describe_files(folder)
    else:
        name = model.path
        parts.append(name)
    text = "\0".join(parts)
    return ModelIdentity(name, blake2b(text.encode(), digest_size=8).hexdigest())


def _describe_files(folder: Path) -> list[str]:
    """Return size and digest of the configuration and of parts of each file of weights."""
    descriptions = []
    for file in sorted(folder.iterdir()):
        if file.name != "config.json" and file.suffix not in WEIGHTS:
            continue
        try:
            size = file.stat().st_size
            digest = blake2b(digest_size=8)
            with file.open("rb") as stream:
                for place in (0, size // 2, max(size - SAMPLED_BYTES, 0)):
                    stream.seek(place)
                    digest.update(stream.read(SAMPLED_BYTES))
        except OSError as error:
            raise UserError(f"{file}: {error.strerror}") from None
        descriptions.append(f"{file.name} {size} {digest.hexdigest()}")
    return descriptions
