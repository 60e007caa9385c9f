"""Decides from a model's config.json alone whether the learner can train it."""

from __future__ import annotations

from collections.abc import Mapping

from rlearner_text.hub import ModelConfig
from rlearner_text.transformers_import import import_transformers


def training_problem(config: ModelConfig) -> str:
    """Return why the learner cannot train a model; empty if it can.

    What a configuration does not show, such as attention that sees later tokens, shows in the trial
    run of ``choose_attention``.

    Args:
        config: config.json of the model.
    """
    import_transformers()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = str(config.get("model_type", ""))
    if (quantization := config.get("quantization_config")) is not None:
        if isinstance(quantization, Mapping):
            method = quantization.get("quant_method", "unknown")
        else:
            method = quantization
        return f"its weights are quantised ({method}): convert them to bfloat16 first"
    if config.get("is_encoder_decoder"):
        return f"{kind} has an encoder: it is no causal language model"
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        # The model brings its own code, which decides.
        return ""
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"transformers has no causal language model of type {kind!r}"
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not config.get("is_decoder"):
        return f"{kind} without is_decoder sees later tokens: it is no causal language model"
    return ""
