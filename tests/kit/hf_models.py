"""Small random models of several architectures, and plain transformers forwards to compare an
engine with.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from broker.contract import wire

VOCAB = 120
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **_COMMON, **_SIZES, num_key_value_heads=2, tie_word_embeddings=False
        )
    )


def _qwen3() -> Any:
    config = transformers.Qwen3Config(
        **_COMMON, **_SIZES, num_key_value_heads=2, head_dim=24, tie_word_embeddings=True
    )
    return transformers.Qwen3ForCausalLM(config)


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _mistral() -> Any:
    """A sliding window in every layer."""
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**_COMMON, **_SIZES, num_key_value_heads=1, sliding_window=9)
    )


def _gemma2() -> Any:
    """Soft-capped attention logits, sliding windows in every other layer."""
    config = transformers.Gemma2Config(
        **_COMMON,
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        attn_logit_softcapping=5.0,
    )
    return transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")


def _gpt_oss() -> Any:
    """Attention sinks, sliding windows, experts."""
    config = transformers.GptOssConfig(
        **_COMMON,
        **_SIZES,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=9,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager")


def _mixtral() -> Any:
    """Experts that transformers holds in one tensor and stores one by one."""
    config = transformers.MixtralConfig(
        **_COMMON, **_SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.MixtralForCausalLM(config)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3, "llama": _llama, "gpt2": _gpt2, "mistral": _mistral, "gemma2": _gemma2, "gpt_oss": _gpt_oss,
}  # fmt: skip
CONVERTED: dict[str, Callable[[], Any]] = {"mixtral": _mixtral}


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a model with weights large enough that its distribution is far from uniform."""
    torch.manual_seed(seed)
    model = (ARCHITECTURES | CONVERTED)[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else None
    model.save_pretrained(folder / name)
    return folder / name


def load(folder: Path) -> Any:
    """As users load it, with the architecture's own attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def changed(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """Other weights for the same model, by name, tied ones once."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: p.detach() + 0.1 * torch.randn(p.shape, generator=generator)
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def logprobs(
    model: Any, prompt: list[int], output: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """log p of each output token given all before it, from one plain forward."""
    ids = torch.tensor([prompt + output])
    table = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return table[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None])[:, 0]


def request(
    name: str,
    prompt: list[int],
    *,
    conversation: str = "",
    min_version: int = 0,
    deadline_s: float = 60.0,
    step: int = -1,
    **sampling: Any,
) -> wire.GenerateRequest:
    """A request for 8 tokens unless told otherwise, end tokens ignored."""
    return wire.GenerateRequest(
        request_id=name,
        conversation_id=conversation or name,
        token_ids=wire.column(prompt, "<i4"),
        sampling=wire.SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling}),
        min_version=min_version,
        deadline_s=deadline_s,
        step=step,
    )
