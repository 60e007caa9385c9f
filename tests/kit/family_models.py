"""Small random models of the families that people train, with windows, chunks and rope switches of
a few tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 120
WINDOW = 9
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LINEAR: dict[str, Any] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOWS: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
_LONGROPE = {
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 16,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        **_FACTORS,
    },
}

# The class of the configuration, and what differs from _COMMON; None leaves a key out.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama_dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 12}),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "phi3": ("Phi3Config", {}),
    "phi4_longrope": ("Phi3Config", {**_LONGROPE, "partial_rotary_factor": 1.0}),
    "gemma2": ("Gemma2Config", {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**_WINDOWS, "query_pre_attn_scalar": 8}),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
            "intermediate_size": 48,
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2, "global_head_dim": 16,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _WINDOWS),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0], "use_sliding_window": False}),
    "glm4": ("Glm4Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "cohere2": ("Cohere2Config", _WINDOWS),
    "exaone4": ("Exaone4Config", _WINDOWS),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),
    "gpt_oss": ("GptOssConfig", {**_WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        "Llama4TextConfig",
        {
            "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0], "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
            "interleave_moe_layer_step": 1, "floor_scale": 32, "attn_scale": 0.5,
        },
    ),
    "qwen3_moe": ("Qwen3MoeConfig", {**_EXPERTS, "num_experts": 4}),
    "qwen3_moe_window": (
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 4, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "olmoe": ("OlmoeConfig", {**_EXPERTS, "num_experts": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**_EXPERTS, **_LATENT, "head_dim": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_EXPERTS, **_LATENT, "head_dim": None}),
    "minimax_m2": ("MiniMaxM2Config", {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}),
    "qwen3_5": ("Qwen3_5TextConfig", _LINEAR),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "falcon_h1": (
        "FalconH1Config",
        {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16},
    ),
}  # fmt: skip


def family_config(name: str) -> Any:
    """Return the configuration of one of FAMILIES."""
    kind, more = FAMILIES[name]
    values = {key: value for key, value in {**_COMMON, **more}.items() if value is not None}
    return getattr(transformers, kind)(**values)


def family_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """Return a random model of one of FAMILIES, in evaluation mode; its weights are large enough
    for errors to show.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        family_config(name), attn_implementation="eager"
    )
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1 and "norm" in key:
            torch.nn.init.normal_(parameter, 1.0 if "gemma" not in name else 0.0, 0.15)
        elif parameter.ndim > 1 or "sinks" in key:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model.to(dtype).eval()


def save_family(
    folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> str:
    """Write a model of one of FAMILIES."""
    family_model(name, seed=seed, dtype=dtype).save_pretrained(folder)
    return str(folder)
