"""What SGLang's API takes and tells, and how its workers load: the parts of the double
(``sglang_double``) that have no state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rollout.engines.base import GenerationOutput

SHIFT = 1  # the core's versions are never below 0, SGLang's are any text
FIELDS = {
    "/generate": {
        "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream",
        "extra_key",
        "return_sampling_mask",
    },
    "/abort_request": {"rid", "abort_all"},
    "/pause_generation": {"mode"},
    "/continue_generation": {"torch_empty_cache"},
    "/update_weight_version": {"new_version", "abort_all_requests"},
    "/update_weights_from_disk": {"model_path", "load_format", "abort_all_requests", "weight_version", "flush_cache",
        "keep_pause"},
    "/init_weights_update_group": {"master_address", "master_port", "rank_offset", "world_size", "group_name",
        "backend"},
    "/destroy_weights_update_group": {"group_name"},
    "/release_memory_occupation": {"tags"},
    "/resume_memory_occupation": {"tags"},
    "/begin_weight_update": {"selector"},
    "/end_weight_update": set(),
    "/update_weights_from_distributed": {
        "names", "dtypes", "shapes", "group_name", "flush_cache", "abort_all_requests", "weight_version", "load_format",
    },
}  # fmt: skip
SAMPLING = {
    "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "skip_special_tokens", "stop",
    "stop_token_ids",
    "sampling_seed",
}  # fmt: skip


def late(output: GenerationOutput) -> list[dict[str, Any]]:
    """The version of each token as SGLang notes it: while it takes one token in, the next is being
    sampled already, so of those that old weights sampled the last has not been taken in when they
    change, and is noted as the new weights'."""
    told, start, taken = [], 0, 0
    for version, count in output.version_runs:
        taken += count
        end = taken if taken == len(output.token_ids) else taken - 1
        if end > start:
            told.append({"version": str(version - SHIFT), "start": start, "end": end})
        start = end
    return told


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    assert (folder / "config.json").is_file()
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def join(name: str, address: str, port: int) -> Any:
    """As SGLang's workers do: torch's helper, the store prefixed by the group's name, ranks noted
    for ``torch.distributed``.
    """
    from torch.distributed import distributed_c10d as c10d

    store, rank, size = next(torch.distributed.rendezvous(f"tcp://{address}:{port}", 1, 2))
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
