"""Small random models of many families, each with the switches of its real configuration, at
lengths of a test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB = 120
WINDOW = 24  # tokens of every window and chunk
ORIGINAL = 40  # positions before longrope changes its factors

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 256,
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
_GQA: dict[str, Any] = {**_BASE, "num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_GQA, "head_dim": 16}
_MOE: dict[str, Any] = {**_GQA, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_MLA: dict[str, Any] = {
    **_BASE, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "linear_attention", "linear_attention",
    "full_attention"],
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_FACTORS = {
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "rope_theta": 1e4,
}


def _configs() -> dict[str, Callable[[], Any]]:
    t: Any = transformers
    return {
        # dense
        "llama": lambda: t.LlamaConfig(**_GQA),
        "llama dynamic": lambda: t.LlamaConfig(
            **_GQA | {"max_position_embeddings": 128},
            rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4},
        ),
        "qwen2": lambda: t.Qwen2Config(**_GQA),
        "qwen2 window": lambda: t.Qwen2Config(
            **_GQA, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
        ),
        "qwen3": lambda: t.Qwen3Config(**_HEADS, tie_word_embeddings=True),
        "mistral": lambda: t.MistralConfig(**_GQA, sliding_window=WINDOW),
        "phi": lambda: t.PhiConfig(**_BASE),
        "phi3": lambda: t.Phi3Config(**_GQA, sliding_window=WINDOW),
        "phi3 longrope": lambda: t.Phi3Config(
            **_GQA, original_max_position_embeddings=ORIGINAL, rope_parameters={"rope_type": "longrope", **_FACTORS}
        ),
        "gemma": lambda: t.GemmaConfig(**_HEADS),
        "gemma2": lambda: t.Gemma2Config(**_HEADS, sliding_window=WINDOW, attn_logit_softcapping=5.0),
        "gemma3": lambda: t.Gemma3TextConfig(**_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING),
        "gemma3n": lambda: t.Gemma3nTextConfig(
            **_HEADS | {"intermediate_size": [96] * 4}, sliding_window=WINDOW, layer_types=_ALTERNATING,
            vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, num_kv_shared_layers=2,
            activation_sparsity_pattern=None, laurel_rank=8, altup_num_inputs=2,
        ),
        "gemma4": lambda: t.Gemma4TextConfig(
            **_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING, global_head_dim=32, num_kv_shared_layers=2,
            hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
        ),
        "olmo": lambda: t.OlmoConfig(**_GQA),
        "olmo2": lambda: t.Olmo2Config(**_GQA),
        "olmo3": lambda: t.Olmo3Config(**_GQA, sliding_window=WINDOW, layer_types=_ALTERNATING),
        "granite": lambda: t.GraniteConfig(**_GQA, attention_multiplier=0.3, residual_multiplier=0.5),
        "smollm3": lambda: t.SmolLM3Config(
            **_GQA, no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=WINDOW,
            layer_types=_ALTERNATING,
        ),
        "glm": lambda: t.GlmConfig(**_HEADS),
        "glm4": lambda: t.Glm4Config(**_HEADS),
        "starcoder2": lambda: t.Starcoder2Config(**_GQA, sliding_window=WINDOW),
        "cohere": lambda: t.CohereConfig(**_GQA),
        "cohere2": lambda: t.Cohere2Config(**_GQA, sliding_window=WINDOW, layer_types=_ALTERNATING),
        "exaone4": lambda: t.Exaone4Config(**_GQA, sliding_window=WINDOW, layer_types=_ALTERNATING),
        "gpt_neox": lambda: t.GPTNeoXConfig(**_BASE),
        "gpt2": lambda: t.GPT2Config(
            vocab_size=VOCAB, n_positions=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=1
        ),
        "opt": lambda: t.OPTConfig(**_BASE, ffn_dim=96, word_embed_proj_dim=64),
        "stablelm": lambda: t.StableLmConfig(**_GQA),
        "nemotron": lambda: t.NemotronConfig(**_GQA),
        "helium": lambda: t.HeliumConfig(**_HEADS),
        "ernie4_5": lambda: t.Ernie4_5Config(**_HEADS),
        "seed_oss": lambda: t.SeedOssConfig(**_HEADS),
        "hunyuan": lambda: t.HunYuanDenseV1Config(**_HEADS),
        "arcee": lambda: t.ArceeConfig(**_GQA),
        "apertus": lambda: t.ApertusConfig(**_GQA),
        "ministral": lambda: t.MinistralConfig(**_HEADS, sliding_window=WINDOW, layer_types=_ALTERNATING),
        # experts
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **_MOE, moe_intermediate_size=32, shared_expert_intermediate_size=32, use_sliding_window=True,
            sliding_window=WINDOW, max_window_layers=2,
        ),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **_MOE, head_dim=16, moe_intermediate_size=32, use_sliding_window=True, sliding_window=WINDOW
        ),
        "olmoe": lambda: t.OlmoeConfig(**_MOE),
        "mixtral": lambda: t.MixtralConfig(**_MOE, sliding_window=WINDOW),
        "phimoe": lambda: t.PhimoeConfig(**_MOE, sliding_window=WINDOW),
        "granitemoe": lambda: t.GraniteMoeConfig(**_MOE),
        "gpt_oss": lambda: t.GptOssConfig(**_MOE, head_dim=16, sliding_window=WINDOW),
        "minimax_m2": lambda: t.MiniMaxM2Config(**_MOE, head_dim=16, rotary_dim=8),
        "llama4": lambda: t.Llama4TextConfig(
            **_HEADS, attention_chunk_size=WINDOW, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=96,
            no_rope_layers=[1, 1, 0, 1], floor_scale=32, moe_layers=[1, 3],
        ),
        "glm4_moe": lambda: t.Glm4MoeConfig(
            **_HEADS, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
            first_k_dense_replace=1, n_group=1, topk_group=1,
        ),
        "deepseek_v2": lambda: t.DeepseekV2Config(**_MLA, topk_method="greedy"),
        "deepseek_v3": lambda: t.DeepseekV3Config(**_MLA),
        "dots1": lambda: t.Dots1Config(
            **_HEADS, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
            first_k_dense_replace=1, n_group=1, topk_group=1, sliding_window=WINDOW, layer_types=_ALTERNATING,
        ),
        "ernie4_5_moe": lambda: t.Ernie4_5_MoeConfig(
            **_HEADS, moe_num_experts=4, moe_k=2, moe_num_shared_experts=1, moe_intermediate_size=32,
        ),
        "hunyuan_moe": lambda: t.HunYuanMoEV1Config(**_HEADS, num_experts=4, moe_topk=2),
        # recurrent states
        "qwen3_5": lambda: t.Qwen3_5TextConfig(**_HEADS, **_DELTA),
        "qwen3_5_moe": lambda: t.Qwen3_5MoeTextConfig(
            **_MOE, **_DELTA, head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
        "qwen3_next": lambda: t.Qwen3NextConfig(
            **_MOE, **_DELTA, head_dim=16, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
        "lfm2": lambda: t.Lfm2Config(
            **_GQA, layer_types=["conv", "full_attention"] * 2, block_multiple_of=32, block_ff_dim=96
        ),
        "lfm2_moe": lambda: t.Lfm2MoeConfig(
            **_MOE, layer_types=["conv", "full_attention"] * 2, moe_intermediate_size=32, num_dense_layers=1
        ),
        "falcon_h1": lambda: t.FalconH1Config(
            **_HEADS, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1,
            mamba_chunk_size=16,
        ),
        "jamba": lambda: t.JambaConfig(
            **_MOE, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        "bamba": lambda: t.BambaConfig(
            **_GQA, attn_layer_indices=[1, 3], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16,
        ),
        "granitemoehybrid": lambda: t.GraniteMoeHybridConfig(
            **_MOE, layer_types=["mamba", "attention"] * 2, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16,
            mamba_chunk_size=16, shared_intermediate_size=32,
        ),
        "minimax": lambda: t.MiniMaxConfig(
            **_MOE, head_dim=16, block_size=16, layer_types=["linear_attention", "full_attention"] * 2
        ),
        "nemotron_h": lambda: t.NemotronHConfig(
            **_GQA | {"num_hidden_layers": 4}, layers_block_type=["mamba", "attention", "mamba", "mlp"],
            mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, chunk_size=16, n_groups=1, head_dim=16,
        ),
        "olmo_hybrid": lambda: t.OlmoHybridConfig(**_GQA, **_DELTA),
    }  # fmt: skip


FAMILIES = _configs()
RECURRENT = (
    "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe", "falcon_h1", "jamba", "bamba", "granitemoehybrid",
    "minimax", "nemotron_h", "olmo_hybrid",
)  # fmt: skip
WINDOWED = (
    "qwen2 window", "mistral", "phi3", "gemma2", "gemma3", "gemma3n", "gemma4", "olmo3", "smollm3", "starcoder2",
    "cohere2", "exaone4", "ministral", "qwen2_moe", "qwen3_moe", "mixtral", "phimoe", "gpt_oss", "llama4", "dots1",
)  # fmt: skip
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "bloom": (
        lambda: transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2),
        "its attention does not go through transformers' AttentionInterface",
    ),
    "gptj": (
        lambda: transformers.GPTJConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2, rotary_dim=8),
        "its attention does not go through transformers' AttentionInterface",
    ),
    "falcon": (
        lambda: transformers.FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2),
        "its attention does not go through transformers' AttentionInterface",
    ),
    "zamba2": (
        lambda: transformers.Zamba2Config(
            **_GQA, layers_block_type=["mamba", "hybrid", "mamba", "hybrid"], mamba_d_state=16, n_mamba_heads=8,
            mamba_ngroups=1, chunk_size=16, num_mem_blocks=1,
        ),
        "layers share one attention module",
    ),
    "mamba2": (
        lambda: transformers.Mamba2Config(
            vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16,
            n_groups=1, chunk_size=16, pad_token_id=0, bos_token_id=0, eos_token_id=1,
        ),
        "it takes no cache as past_key_values",
    ),
    "recurrent_gemma": (
        lambda: transformers.RecurrentGemmaConfig(
            **_GQA | {"num_hidden_layers": 3}, attention_window_size=WINDOW, lru_width=64
        ),
        "2 of its 3 layers keep what they have read outside transformers' caches",
    ),
}  # fmt: skip


def make_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 3.0
) -> Any:
    """Return a model whose weights are large enough that a wrong mask changes its output."""
    torch.manual_seed(seed)
    config = FAMILIES[name]() if name in FAMILIES else REFUSED[name][0]()
    attention = {"attn_implementation": "eager"} if name in ("gemma2", "gpt_oss") else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return model.to(dtype).eval()
