"""Separates the language model in a transformers model from its other parts."""

from __future__ import annotations

from typing import Any, Final

# transformers' name of the layer from hidden states to the labels of a classifier
CLASSIFIER_HEAD: Final = "score"


def untrained_parts(module: Any) -> list[str]:
    """Return the names of parameters outside of the language model, such as a vision tower's.

    The head of a classifier is trained as the output embeddings are.
    """
    text = [
        module.get_decoder(),
        module.get_output_embeddings(),
        getattr(module, CLASSIFIER_HEAD, None),
    ]
    own = {id(parameter) for part in text if part is not None for parameter in part.parameters()}
    return [name for name, parameter in module.named_parameters() if id(parameter) not in own]
