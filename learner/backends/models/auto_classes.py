"""Chooses the class of transformers that loads a model: a language model, or a classifier."""

from __future__ import annotations

from typing import Any, Final, Literal

from rlearner_text.hub import ModelConfig
from rlearner_text.transformers_import import import_transformers

AutoClass = Literal["AutoModelForCausalLM", "AutoModelForSequenceClassification"]

LANGUAGE_MODEL: Final = "AutoModelForCausalLM"
CLASSIFIER: Final = "AutoModelForSequenceClassification"


def auto_class_of(config: ModelConfig) -> AutoClass:
    """Return the name of the class that loads the model of a config.json."""
    architectures = config.get("architectures") or ()
    if any("ForSequenceClassification" in name for name in architectures):
        return CLASSIFIER
    return LANGUAGE_MODEL


def import_auto_class(name: AutoClass) -> Any:
    """Return a class by its name.

    Raises:
        ImportError: if transformers is not installed.
    """
    import_transformers()
    import transformers

    return getattr(transformers, name)


def classifier_problem(config: ModelConfig) -> str:
    """Return why a model cannot become, or is not, a classifier with one label; empty if it can.

    Args:
        config: config.json of a language model or a classifier.
    """
    import_transformers()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    kind = str(config.get("model_type", ""))
    if CLASSIFIER not in (config.get("auto_map") or {}) and (
        kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    ):
        return f"transformers has no sequence classifier of type {kind!r}"
    if auto_class_of(config) == CLASSIFIER and (number := count_labels(config)) != 1:
        return f"its classifier has {number} labels, a reward model has 1"
    return ""


def count_labels(config: ModelConfig) -> int:
    """Return the number of labels of a classifier, by its config.json; without one it is 2."""
    names = config.get("id2label")
    return len(names) if names else int(config.get("num_labels") or 2)
