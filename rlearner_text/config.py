"""The configuration section ``model``, and the check of a model's path."""

from __future__ import annotations

from broker.settings.schema.model import ModelSection, TinyModel

__all__ = ["ModelSection", "TinyModel", "check_model_path"]


def check_model_path(path: str, key: str = "model.path") -> None:
    """Check that a path is a Hugging Face model: a folder, or a hub name that resolves.

    Raises:
        ConfigError: if it is not; names the key, the path and what is missing.
    """
    from rlearner_text.hub import check_model

    check_model(path, key)
