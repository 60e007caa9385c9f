"""Megatron-core's GPTModel for one stage, with torch's attention and transformers' positions.

Without Transformer Engine, Megatron's attention makes a (row, row) matrix and takes no packed rows;
torch's needs none. Modules get their process groups as arguments, since Megatron's global state
needs a GPU.
"""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from learner.backends.megatron.architecture import DecoderArchitecture
from learner.backends.megatron.grid import ProcessGroups, RankGrid
from learner.backends.models.attention import SequenceAttention, attend_sequences
from learner.backends.models.packed_rows import PackedRow


@dataclass
class RowLayout:
    """The layout of a forward pass, which Megatron carries as its ``packed_seq_params``."""

    positions: Tensor  # (L,) int64, each token's place in its own sequence
    packing: PackedRow | None  # of the only row; None if each row is a sequence
    qkv_format: str = "sbhd"
    cp_group: Any = None


class CausalAttention(nn.Module):
    """Replaces Megatron's core attention."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: Any,
        packed_seq_params: RowLayout | None = None,
        **__: Any,
    ) -> Tensor:
        """Map (tokens, rows, heads, width) each to (tokens, rows, heads * width).

        Keys and values may have fewer heads.
        """
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        packing = None if packed_seq_params is None else packed_seq_params.packing
        attended: Tensor = attend_sequences(
            SequenceAttention(self._scale), query, key, value, packing
        )
        # from (rows, tokens, heads, width)
        return attended.transpose(0, 1).flatten(2)


class RotaryEmbedding(nn.Module):
    """Replaces Megatron's rotary embedding; takes any positions, at transformers' frequencies."""

    inv_freq: Tensor

    def __init__(self, inv_freq: Tensor) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> Tensor:
        """Return positions, not a length: Megatron passes the result to ``forward``."""
        # Megatron passes its ``packed_seq_params`` last.
        row = arguments[-1]
        assert isinstance(row, RowLayout)
        return row.positions

    def forward(self, positions: Tensor, **_: Any) -> Tensor:
        """Return the angles, (L, 1, 1, width), of positions, (L,)."""
        angles = torch.outer(positions.float(), self.inv_freq)
        return torch.cat([angles, angles], -1)[:, None, None]


@cache
def megatron_library() -> Any:
    """Import the parts of megatron-core that are used."""
    # With one queue CUDA starts kernels in order, so all-reduces overlap with the backward pass.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Megatron calls functions that torch has deprecated, and misses optional packages.
        warnings.simplefilter("ignore")
        gpt = import_module("megatron.core.models.gpt")
        specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
        block = import_module("megatron.core.transformer.transformer_block")
        norm = import_module("megatron.core.transformer.torch_norm")
        config = import_module("megatron.core.transformer")
        groups = import_module("megatron.core.process_groups_config")
        parallel = import_module("megatron.core.tensor_parallel")

    class Trunk(gpt.GPTModel):  # type: ignore[name-defined, misc]
        """GPTModel without logits, which are needed for few positions only."""

        def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
            return hidden_states

    return SimpleNamespace(
        Trunk=Trunk,
        layer_spec=specs.get_gpt_layer_local_spec,
        Submodules=block.TransformerBlockSubmodules,
        Norm=norm.WrappedTorchNorm,
        Config=config.TransformerConfig,
        Collection=groups.ProcessGroupCollection,
        Parallel=(parallel.ColumnParallelLinear, parallel.RowParallelLinear),
        sum_of_shares=parallel.reduce_from_tensor_model_parallel_region,
        sum_of_slopes=parallel.copy_to_tensor_model_parallel_region,
    )


def build_stage(
    shape: DecoderArchitecture,
    freqs: Tensor,
    dtype: torch.dtype,
    grid: RankGrid,
    groups: ProcessGroups,
) -> Any:
    """Build the layers of one stage on the CPU, with weights not yet initialised."""
    with warnings.catch_warnings():
        # Megatron warns of its own deprecated defaults.
        warnings.simplefilter("ignore")
        # torch's norms do not follow ``params_dtype``
        model = _build_layers(shape, dtype, grid, groups).to(dtype)
    model.rotary_pos_emb = RotaryEmbedding(freqs)
    return model.eval()


def _build_layers(
    shape: DecoderArchitecture, dtype: torch.dtype, grid: RankGrid, groups: ProcessGroups
) -> Any:
    megatron = megatron_library()
    config = megatron.Config(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_groups,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.eps,
        qk_layernorm=shape.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        gated_linear_unit=True,
        activation_func=functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Fused kernels are compiled at the first step, and round differently on other machines.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        batch_p2p_comm=False,
    )
    layer = megatron.layer_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    own_groups = {
        "tp": groups.tp,
        "pp": groups.pipeline,
        "cp": groups.alone,
        "dp": groups.dp,
        "dp_cp": groups.dp,
    }
    return megatron.Trunk(
        config,
        megatron.Submodules([layer] * (shape.num_layers // grid.pp), megatron.Norm),
        vocab_size=-(-shape.vocab // grid.tp) * grid.tp,
        max_sequence_length=shape.max_positions,
        pre_process=grid.stage == 0,
        post_process=grid.stage == grid.pp - 1,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        pg_collection=megatron.Collection(**own_groups, embd=None, pos_embd=None),
    )
