"""The configuration section ``rollout``: engine, capacity and weight updates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from broker.contract.wire import ACTOR
from broker.settings.config import Section


class RolloutSection(Section):
    """Settings of a generation server."""

    engine: str = "hf"  # a name in the registry of rollout/engines, or MODULE:CLASS
    engine_args: dict[str, Any] = Field(default_factory=dict)
    policy: str = ACTOR  # policy that these servers offer; only the actor follows the learner's weights
    model_path: str | None = None  # weights of a policy other than the actor; None: those that the run started from
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # context tokens in one forward pass
    prefix_cache: bool = True
    update_mode: Literal["keep", "recompute", "abort"] = "keep"  # what happens to requests in flight at new weights
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None  # OpenAI-compatible API; 0: any free port
    snapshot: str | None = None  # train.weights_snapshot_every: folder or URL to start from without the learner
    snapshot_only: bool = False  # never request weights from the learner, only read snapshots
    num_threads: NonNegativeInt = 0  # torch threads; 0: torch's default
    drain_timeout_s: PositiveFloat = 30.0
