"""Which architectures are tried, and the settings that make each of them small and complete."""

from __future__ import annotations

from typing import Any, Final

from bench.families.architectures import ORIGINAL, POSITIONS, VOCABULARY, WINDOW, Architecture

_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LOCAL: Final[dict[str, Any]] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Final[dict[str, Any]] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_LATENT: Final[dict[str, Any]] = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
_ALTERNATING: Final[dict[str, Any]] = {
    "num_hidden_layers": 4, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
_LINEAR: Final[dict[str, Any]] = {
    "num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LONGROPE: Final[dict[str, Any]] = {
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL,
        "short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)],
    },
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _when_rope(kind: str) -> dict[str, Any]:
    return {"rope_parameters.rope_type": kind}


_TIED: Final = {"tie_word_embeddings": True}

DENSE: Final = (
    Architecture("llama", required=True),
    Architecture("llama.tied", when=_TIED, settings=_TIED, required=True),
    Architecture("llama.llama3", when=_when_rope("llama3"), required=True, settings=_rope("llama3", factor=8.0,
        low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL)),
    Architecture("llama.yarn", when=_when_rope("yarn"),
        settings=_rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL)),
    Architecture("llama.linear", when=_when_rope("linear"), settings=_rope("linear", factor=4.0)),
    Architecture("llama.dynamic", when=_when_rope("dynamic"),
        settings={**_rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL}),
    Architecture("qwen2", settings={"tie_word_embeddings": True}, required=True),
    Architecture("qwen2.window", when={"use_sliding_window": True}, required=True,
        settings={"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    Architecture("qwen3", settings={"tie_word_embeddings": True}, required=True),
    Architecture("mistral", settings={"sliding_window": WINDOW}, required=True),
    Architecture("ministral", settings=_ALTERNATING),
    Architecture("ministral3", settings=_rope("yarn", factor=4.0, original_max_position_embeddings=ORIGINAL,
        llama_4_scaling_beta=0.1, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0)),
    Architecture("phi", settings={"partial_rotary_factor": 0.5, "num_key_value_heads": 4}),
    Architecture("phi3", settings={"sliding_window": WINDOW}, required=True),
    Architecture("phi3.longrope", when=_when_rope("longrope"), settings=_LONGROPE, required=True),
    Architecture("gemma", settings={"tie_word_embeddings": True}),
    Architecture("gemma2", settings={**_ALTERNATING, "tie_word_embeddings": True, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0, "query_pre_attn_scalar": 16}, required=True),
    Architecture("gemma3_text", settings={**_ALTERNATING, "tie_word_embeddings": True, "query_pre_attn_scalar": 16},
        required=True),
    Architecture("gemma4_text", settings={**_ALTERNATING, "tie_word_embeddings": True, "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0},
        required=True),
    Architecture("olmo", settings={"clip_qkv": 1.0}),
    Architecture("olmo2"),
    Architecture("olmo3", settings=_ALTERNATING, required=True),
    Architecture("granite", settings={"attention_multiplier": 0.2, "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5, "logits_scaling": 1.5, "tie_word_embeddings": True}, required=True),
    Architecture("smollm3", settings={"num_hidden_layers": 4, "no_rope_layer_interval": 4}, required=True),
    Architecture("glm", settings={"partial_rotary_factor": 0.5}),
    Architecture("glm4", settings={"partial_rotary_factor": 0.5}, required=True),
    Architecture("starcoder2", settings={"sliding_window": WINDOW, "tie_word_embeddings": True}, required=True),
    Architecture("cohere", settings={"tie_word_embeddings": True, "logit_scale": 0.5}),
    Architecture("cohere2", settings={**_ALTERNATING, "tie_word_embeddings": True, "logit_scale": 0.5},
        required=True),
    Architecture("exaone4", settings=_ALTERNATING, required=True),
    Architecture("gpt_neox", required=True,
        settings={"num_key_value_heads": None, "head_dim": None, "rotary_pct": 0.5}),
    Architecture("opt", settings={"num_key_value_heads": None, "head_dim": None, "intermediate_size": None,
        "ffn_dim": 96, "word_embed_proj_dim": 64, "tie_word_embeddings": True}, required=True),
    Architecture("gpt2", settings={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}),
    Architecture("stablelm", settings={"partial_rotary_factor": 0.5, "head_dim": None}),
    Architecture("nemotron", settings={"partial_rotary_factor": 0.5}),
    Architecture("helium"),
    Architecture("ernie4_5", settings={"tie_word_embeddings": True}),
    Architecture("seed_oss"),
    Architecture("hunyuan_v1_dense", settings=_rope("dynamic", factor=1.0, alpha=1000.0)),
    Architecture("arcee"),
    Architecture("apertus"),
    Architecture("nanochat"),
    Architecture("cwm", settings={**_ALTERNATING, "bos_token_id": 0}),
    Architecture("vaultgemma", settings={**_ALTERNATING, "tie_word_embeddings": True, "attn_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 16}),
    Architecture("gemma3n_text", settings={**_ALTERNATING, "intermediate_size": [96] * 4,
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "tie_word_embeddings": True}),
    Architecture("gpt_bigcode", settings={"num_key_value_heads": None, "head_dim": None,
        "tie_word_embeddings": True}),
    Architecture("gptj", settings={"num_key_value_heads": None, "head_dim": None, "rotary_dim": 8,
        "intermediate_size": None}),
    Architecture("falcon", settings={"num_key_value_heads": None, "head_dim": None}),
    Architecture("bloom", settings={"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": True}),
    Architecture("persimmon", settings={"num_key_value_heads": None, "head_dim": None}),
)  # fmt: skip

MOE: Final = (
    Architecture("qwen2_moe", "moe", {**_EXPERTS, "shared_expert_intermediate_size": 32}),
    Architecture("qwen3_moe", "moe", _EXPERTS, required=True),
    Architecture("qwen3_moe.window", "moe", {**_EXPERTS, "use_sliding_window": True, "sliding_window": WINDOW},
        when={"use_sliding_window": True}, required=True),
    Architecture("olmoe", "moe", _EXPERTS, required=True),
    Architecture("mixtral", "moe", {**_LOCAL, "sliding_window": WINDOW}, required=True),
    Architecture("glm4_moe", "moe", {**_ROUTED, "partial_rotary_factor": 0.5}, required=True),
    Architecture("deepseek_v2", "moe", {**_ROUTED, **_LATENT, "topk_method": "greedy", "n_group": 1}, required=True),
    Architecture("deepseek_v3", "moe", {**_ROUTED, **_LATENT}, required=True),
    Architecture("minimax_m2", "moe", {**_LOCAL, "rotary_dim": 8}, required=True),
    Architecture("gpt_oss", "moe", {**_LOCAL, **_ALTERNATING}, required=True),
    Architecture("llama4_text", "moe", {**_LOCAL, "num_experts_per_tok": 1, "num_hidden_layers": 4,
        "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2, "attention_chunk_size": WINDOW,
        "no_rope_layers": [1, 1, 1, 0], "floor_scale": 20, "attn_scale": 0.1}, required=True),
    Architecture("phimoe", "moe", _LOCAL),
    Architecture("granitemoe", "moe", {**_LOCAL, "tie_word_embeddings": True}),
    Architecture("granitemoeshared", "moe", {**_LOCAL, "shared_intermediate_size": 32, "tie_word_embeddings": True}),
    Architecture("dots1", "moe", _ROUTED),
    Architecture("ernie4_5_moe", "moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1}),
    Architecture("hunyuan_v1_moe", "moe", {"num_experts": 4, "moe_topk": 2,
        **_rope("dynamic", factor=1.0, alpha=1000.0)}),
    Architecture("flex_olmo", "moe", _EXPERTS),
    Architecture("exaone_moe", "moe", {**_EXPERTS, **_ALTERNATING, "num_shared_experts": 1, "n_group": 1,
        "topk_group": 1}),
    Architecture("jetmoe", "moe", {**_LOCAL, "kv_channels": 16, "head_dim": None, "num_key_value_heads": 2,
        "num_attention_heads": None, "tie_word_embeddings": True}),
    Architecture("longcat_flash", "moe", {**_LATENT, "num_layers": 2, "num_hidden_layers": None, "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 2}),
)  # fmt: skip

HYBRID: Final = (
    Architecture("qwen3_5_text", "hybrid", {**_LINEAR, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1]}}, required=True),
    Architecture("qwen3_next", "hybrid", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32,
        "partial_rotary_factor": 0.5}, required=True),
    Architecture("lfm2", "hybrid", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_L_cache": 3, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "head_dim": None},
        required=True),
    Architecture("lfm2_moe", "hybrid", {**_EXPERTS, "num_hidden_layers": 3, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "head_dim": None}),
    Architecture("falcon_h1", "hybrid", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 1, "mamba_chunk_size": 16}, required=True),
    Architecture("jamba", "hybrid", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "mamba_d_state": 8, "mamba_dt_rank": 4, "head_dim": None}),
    Architecture("bamba", "hybrid", {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16, "partial_rotary_factor": 0.5}),
    Architecture("zamba2", "hybrid", {"num_hidden_layers": 4, "num_key_value_heads": 4, "n_mamba_heads": 8,
        "mamba_headdim": 16, "mamba_d_state": 16, "mamba_ngroups": 1, "chunk_size": 16, "num_mem_blocks": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "adapter_rank": 4, "head_dim": None,
        "attention_head_dim": 32, "tie_word_embeddings": True}),
    Architecture("minimax", "hybrid", {**_LOCAL, "num_hidden_layers": 2, "block_size": 16,
        "layer_types": ["linear_attention", "full_attention"]}),
    Architecture("granitemoehybrid", "hybrid", {**_LOCAL, "layer_types": ["mamba", "attention"], "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
        "shared_intermediate_size": 32, "tie_word_embeddings": True}),
    Architecture("nemotron_h", "hybrid", {"num_hidden_layers": None, "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16}),
    Architecture("mamba2", "hybrid", {"num_attention_heads": None, "num_key_value_heads": None, "num_heads": 8,
        "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    Architecture("recurrent_gemma", "hybrid", {"num_hidden_layers": 3, "lru_width": 64,
        "attention_window_size": WINDOW, "head_dim": None}),
)  # fmt: skip

_VISION: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
}

VISION: Final = (
    Architecture("qwen3_5", "vision", {"tie_word_embeddings": True, "image_token_id": 110, "video_token_id": 111,
        "vision_start_token_id": 112, "vision_end_token_id": 113},
        parts={
            "text_config": {**_LINEAR, "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1]}},
            "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                "out_hidden_size": 64, "patch_size": 4, "num_position_embeddings": 16}}, required=True),
    Architecture("gemma3", "vision", {"image_token_index": 110, "boi_token_index": 111, "eoi_token_index": 112,
        "mm_tokens_per_image": 4},
        parts={"text_config": {**_ALTERNATING, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
            "vision_config": {**_VISION, "intermediate_size": 48, "image_size": 16, "patch_size": 4}}, required=True),
)  # fmt: skip

ARCHITECTURES: Final = (*DENSE, *MOE, *HYBRID, *VISION)
assert POSITIONS > ORIGINAL
