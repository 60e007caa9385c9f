"""What tests of engines have in common: a small model, and requests."""

from __future__ import annotations

from typing import Any

from waits import LONG_S

from broker.contract import wire
from rlearner_text.config import TinyModel

PROMPT = [10, 11, 12, 13]
TINY = TinyModel(
    hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
)


def ask(
    name: str,
    prompt: list[int] | None = None,
    *,
    min_version: int = 0,
    deadline_s: float = LONG_S,
    **sampling: Any,
) -> wire.GenerateRequest:
    """For 12 tokens unless told otherwise, end tokens ignored."""
    return wire.GenerateRequest(
        request_id=name, conversation_id=name, token_ids=wire.column(PROMPT if prompt is None else prompt, "<i4"),
        min_version=min_version,
        deadline_s=deadline_s, sampling=wire.SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 7,
            **sampling}),
    )  # fmt: skip
