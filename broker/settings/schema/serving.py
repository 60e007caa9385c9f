"""The section ``rollout``: engine, capacity and weight updates."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from broker.contract.wire import ACTOR
from broker.settings.config import ModelPath, PluginMark, Section


def _address(value: str) -> str:
    if value != "localhost":
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(
                "an IP address of this host, for example 10.0.0.1, or 0.0.0.0 for all"
            ) from None
    return value


class RolloutSection(Section):
    """Settings of a generation server."""

    harmless = (
        "policy", "max_running", "max_context_tokens", "prefill_tokens", "prefix_cache",
        "preempt_after_s", "update_mode", "exact", "dtype", "weights_into", "num_threads",
        "drain_timeout_s",
    )  # fmt: skip

    # a name in the registry of rollout/engines, or MODULE:CLASS
    engine: Annotated[str, PluginMark("engines", "rollout.engines:ENGINE_ARGS", "engine_args")] = (
        "hf"
    )
    # arguments of the engine, checked by its class
    engine_args: dict[str, Any] = Field(default_factory=dict)
    # policy that these servers offer; only the actor follows the learner's weights
    policy: str = ACTOR
    model_path: ModelPath | None = (
        None  # weights of a policy other than the actor; null: those that the run started from
    )
    # of the weights and of what the engine computes; null: that of model.dtype
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    max_running: PositiveInt = 64  # requests in one decode batch
    max_context_tokens: PositiveInt = 4096  # prompt and output together
    prefill_tokens: PositiveInt = 4096  # context tokens in one forward pass
    # keep keys and values of prompts for requests that begin alike
    prefix_cache: bool = True
    # how long a request waits before a running one of a later training step makes way for it; null:
    # none ever does
    preempt_after_s: NonNegativeFloat | None = 2.0
    # what happens to requests in flight at new weights
    update_mode: Literal["keep", "recompute", "abort"] = "keep"
    # tokens have the very logprobs that the learner computes, bit for bit: engine hf with
    # train.backend torch; slower
    exact: bool = False
    # OpenAI-compatible API; 0: any free port
    http_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    # where it listens; null: at broker.bind
    http_bind: Annotated[str, AfterValidator(_address)] | None = None
    # file with its TLS certificate or chain, PEM; null: plain HTTP, on loopback only
    http_tls_cert: str | None = None
    http_tls_key: str | None = None  # file with the private key, PEM
    # auto: by nccl into the engine's workers, else through the server's process; workers: by gloo
    # too; server: never
    weights_into: Literal["auto", "workers", "server"] = "auto"
    # train.weights_snapshot_every: folder or URL to start from without the learner
    snapshot: str | None = None
    snapshot_only: bool = False  # never request weights from the learner, only read snapshots
    num_threads: NonNegativeInt = 0  # torch threads; 0: torch's default
    # how long a server that stops waits for running requests
    drain_timeout_s: PositiveFloat = 30.0
