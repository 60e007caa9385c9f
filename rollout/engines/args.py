"""The settings of each engine, ``rollout.engine_args``; nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from broker.config import Section


class HFArgs(Section):
    """Settings of the engine ``hf``."""

    kv_slots: PositiveInt | None = None  # conversations whose KV is held at once; None: twice max_running, within the budget
    kv_cache_gib: PositiveFloat = 8.0  # memory for the KV cache; fewer slots are made when they would not fit


class RandomArgs(Section):
    """Settings of the engine ``random``."""

    choices: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list
    )  # texts to choose among, uniformly; empty: uniform tokens
    delay_s: Annotated[float, Field(ge=0)] = 0.0  # time per token, to stand in for a slow engine
