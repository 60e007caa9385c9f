"""Fixes rotary positions for a run's longest context, where transformers changes them with the
longest in a batch.

With ``longrope`` (Phi-3, Phi-4-mini) and ``dynamic`` the frequencies of all sequences in a batch
depend on its longest: cached keys and sequences of other lengths then have those of another length.
As vLLM does, a run uses one set of frequencies, that of its longest context, for every token.
"""

from __future__ import annotations

from typing import Any, Final

import torch

# A rope_type that transformers never updates.
FIXED: Final = "fixed"
_CHANGING: Final = frozenset({"longrope", "dynamic"})


def fix_rope(model: torch.nn.Module, max_context: int) -> tuple[str, ...]:
    """Let a transformers model compute rotary positions as at ``max_context`` tokens, always.

    The configuration stays, so a saved model is as it was.

    Args:
        model: on its device; its frequencies are not on the meta device.
        max_context: rollout.max_context_tokens of the run, in every process.

    Returns:
        The kinds of rotary positions that changed, such as ``longrope``; empty for most models.

    Raises:
        ValueError: if the frequencies are on the meta device; fix them after they have been
            computed.
    """
    kinds: set[str] = set()
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if kind in _CHANGING:
                    _fix_frequencies(module, kind, max_context, layer_type)
                    kinds.add(kind)
            # An attribute of transformers, no tensor.
            module.rope_type = {  # type: ignore[assignment]
                layer_type: FIXED if kind in _CHANGING else kind
                for layer_type, kind in rope_type.items()
            }
        elif rope_type in _CHANGING and hasattr(module, "inv_freq"):
            _fix_frequencies(module, str(rope_type), max_context, None)
            module.rope_type = FIXED  # type: ignore[assignment]
            kinds.add(str(rope_type))
    return tuple(sorted(kinds))


def _fix_frequencies(module: Any, kind: str, max_context: int, layer_type: str | None) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    prefix = f"{layer_type}_" if layer_type else ""
    frequencies: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    if frequencies.is_meta:
        raise ValueError("rotary frequencies on the meta device cannot be fixed")
    if kind == "dynamic" and max_context <= module.original_max_seq_len:
        # Within its positions nothing changes, and some models (HunYuan) begin with frequencies of
        # their own.
        frequencies.copy_(getattr(module, f"{prefix}original_inv_freq"))
        return
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    compute = ROPE_INIT_FUNCTIONS[kind]
    fixed, scaling = compute(module.config, frequencies.device, seq_len=max_context, **kwargs)
    frequencies.copy_(fixed)
    getattr(module, f"{prefix}original_inv_freq").copy_(fixed)
    setattr(module, f"{prefix}attention_scaling", scaling)
