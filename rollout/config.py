"""The section ``rollout``: which engine, how it samples and takes new weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from broker.config import Section


class RolloutSection(Section):
    """Settings of a generation server."""

    engine: str = "hf"  # a name of the registry in rollout/engines
    engine_args: dict[str, Any] = {}
    policy: str = "actor"  # whose policy these servers offer
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # padded tokens of one prefill pass
    prefix_cache: bool = True
    update_mode: Literal["keep", "recompute", "abort"] = "keep"  # what happens to requests in flight at new weights
    num_threads: NonNegativeInt = 0  # torch threads, 0 leaves the default
    drain_timeout_s: PositiveFloat = 30.0
