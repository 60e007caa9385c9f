"""Registry of engines, for ``broker.settings.registry.resolve("engines", name, ENGINES)``."""

from __future__ import annotations

from typing import Final

ENGINES: Final[dict[str, str]] = {
    "hf": "rollout.engines.hf.engine:HFEngine",
    "openai": "rollout.engines.openai:OpenAIEngine",
    "random": "rollout.engines.random:RandomEngine",
    "sglang": "rollout.engines.sglang.engine:SGLangEngine",
    "vllm": "rollout.engines.vllm.engine:VLLMEngine",
}

# Pydantic models of ``rollout.engine_args``; they import nothing heavy.
ENGINE_ARGS: Final[dict[str, str]] = {
    "hf": "rollout.engines.args:HFArgs",
    "openai": "rollout.engines.args:OpenAIArgs",
    "random": "rollout.engines.args:RandomArgs",
    "sglang": "rollout.engines.sglang.args:SGLangArgs",
    "vllm": "rollout.engines.args:VLLMArgs",
}
