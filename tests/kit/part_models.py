"""Small random models with stacked experts, towers or shared layers: the configuration classes that
people train.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_ROPE: dict[str, Any] = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]
}  # fmt: skip

SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS,
    "olmoe": {**_EXPERTS, "head_dim": 8},
    "mixtral": _LOCAL,
    "glm4_moe": _ROUTED,
    "deepseek_v2": {**_ROUTED, **_LATENT, "topk_method": "greedy"},
    "deepseek_v3": {**_ROUTED, **_LATENT},
    "dots1": _ROUTED,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 24, "partial_rotary_factor": 0.5},
    "gpt_oss": {**_LOCAL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "llama4_text": {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64},
    "phimoe": _LOCAL,
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_expand": 1, "mamba_chunk_size": 16},
    "gemma3n_text": {"intermediate_size": [48] * 2, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 2,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "tie_word_embeddings": True},
}  # fmt: skip
WITH_VISION: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "tie_word_embeddings": True, "image_token_id": 30, "video_token_id": 31, "vision_start_token_id": 32,
        "vision_end_token_id": 33,
        "text_config": {**_SIZES, **_LINEAR, "tie_word_embeddings": True, "rope_parameters": _ROPE},
        "vision_config": {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
            "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16},
    },
    "gemma3": {
        "image_token_index": 30, "boi_token_index": 31, "eoi_token_index": 32, "mm_tokens_per_image": 4,
        "text_config": {**_SIZES, "tie_word_embeddings": True, "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        "vision_config": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
            "intermediate_size": 24, "image_size": 16, "patch_size": 4},
    },
}  # fmt: skip


@torch.no_grad()
def save_parts(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> str:
    """Write a model, as published: with all its parts, stacked experts one by one."""
    torch.manual_seed(0)
    if name in WITH_VISION:
        config = transformers.AutoConfig.for_model(name, **WITH_VISION[name])
        model = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        config = transformers.AutoConfig.for_model(
            name, **{**_SIZES, "tie_word_embeddings": False, **SETTINGS[name]}
        )
        model = transformers.AutoModelForCausalLM.from_config(config)
    for key, parameter in model.named_parameters():
        if parameter.ndim > 1 and "conv" not in key:
            parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"kept": "byte for byte"}')
    return str(folder)
