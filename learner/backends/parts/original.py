"""The files of the model that a run started from."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from learner.backends.parts.names import MODEL_FILE, STATE_FOLDER
from learner.backends.parts.stored import StoredTensors, weights_in_files
from learner.backends.parts.stored_model import StoredModel
from rlearner_text.hub import ModelConfig, model_folder

# Configurations of processors of images, videos and sounds.
_PROCESSORS: Final = "*processor*.json"
# transformers 4 wrote the second, 5 writes the first.
_DTYPES: Final = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class OriginalModel:
    """A folder with a model.

    Attributes:
        path: the folder as it was configured, or a hub name.
    """

    path: str
    folder: Path

    @cached_property
    def tensors(self) -> StoredTensors:
        """Read the headers of its files.

        Raises:
            DamagedFileError: if a file is missing or damaged.
        """
        return weights_in_files(self.folder)

    @cached_property
    def config(self) -> ModelConfig:
        """Its config.json; empty if there is none."""
        file = self.folder / "config.json"
        if not file.is_file():
            return {}
        return dict(json.loads(file.read_text("utf-8")))

    def write_config(self, folder: Path, dtype: str) -> None:
        """Write the configurations of the model with all its parts, and of its processors.

        Args:
            dtype: of the weights that were trained.
        """
        config = json.loads(json.dumps(self.config))
        for section in (config, config.get("text_config") or {}):
            section.update(dict.fromkeys([key for key in _DTYPES if key in section], dtype))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in self.folder.glob(_PROCESSORS):
            shutil.copyfile(file, folder / file.name)


def find_original(path: str) -> OriginalModel:
    """Return the model at a path, or the one that a checkpoint's run started from.

    A checkpoint with weights in Hugging Face format is a model itself.
    """
    folder = Path(model_folder(path))
    about = folder / STATE_FOLDER / MODEL_FILE
    if about.is_file() and not any(folder.glob("*.safetensors")):
        model = msgspec.json.decode(about.read_bytes(), type=StoredModel)
        if model.original:
            return find_original(model.original)
    return OriginalModel(path, folder)
