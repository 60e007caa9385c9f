"""Decides from a configuration whether engine hf can run a model, before its weights are read."""

from __future__ import annotations

import inspect
from typing import Any, Final

# Families whose class does not show the reason. A pass over a sequence would, but needs the
# weights.
_KNOWN: Final = {
    "zamba": "its layers share one attention module",
    "zamba2": "its layers share one attention module",
    "recurrent_gemma": "2 of its 3 layers keep what they have read outside transformers' caches",
}


def unsupported_reason(config: Any) -> str:
    """Return why the engine cannot run models of a transformers configuration; empty if nothing
    speaks against it.

    Models of a type that only remote code knows are left to the engine's self-test.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if reason := _KNOWN.get(config.get_text_config().model_type):
        return reason
    try:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        if type(config).__module__.startswith("transformers."):
            return f"transformers has no causal language model of type {config.model_type}"
        return ""
    return unsupported_class(model_class[0] if isinstance(model_class, tuple) else model_class)


def unsupported_class(model_class: Any) -> str:
    """Return why the engine cannot run models of a class; empty if nothing speaks against it."""
    parameters = inspect.signature(model_class.forward).parameters
    if "past_key_values" not in parameters:
        return "it takes no cache as past_key_values"
    replaceable = getattr(model_class, "_can_set_attn_implementation", None)
    if replaceable is not None and not replaceable():
        return "its attention does not go through transformers' AttentionInterface"
    return ""
