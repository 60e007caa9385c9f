"""The section ``rollout``: which engine, how it samples and takes new weights."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from broker.contract.wire import ACTOR
from broker.settings.config import Section


class RolloutSection(Section):
    """Settings of a generation server."""

    engine: str = "hf"  # a name of the registry in rollout/engines
    engine_args: dict[str, Any] = Field(default_factory=dict)
    policy: str = ACTOR  # whose policy these servers offer; only the actor's weights follow the learner's
    model_path: str | None = None  # weights of another policy than the actor; None: those that the run started from
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # context tokens of one pass
    prefix_cache: bool = True
    update_mode: Literal["keep", "recompute", "abort"] = "keep"  # what happens to requests in flight at new weights
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # OpenAI-compatible HTTP API there; 0 any free port, null none
    snapshot: str | None = None  # folder or http address to start from while the learner cannot be had: train.weights_snapshot_every
    snapshot_only: bool = False  # never ask the learner for weights: take those alone that are written
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default
    drain_timeout_s: PositiveFloat = 30.0
