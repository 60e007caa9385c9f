"""Measures what ranks need beyond their shards while a model is loaded and a checkpoint written.

    python -m bench.nodes_memory [--ranks 4] [--layers 40]

``peak_load_ratio``: the largest rank's memory until it has its weights, beyond its shard, as a
share of the model. ``trial_ratio``: that of the trial runs afterwards, which gather a layer at a
time as training does. ``peak_checkpoint_ratio``: that while it copies and writes its part, beyond
shard, moments and that copy. All by RssAnon, with FSDP over gloo and a random model of 400 M
parameters in float32. The allocator returns what is freed (MALLOC_MMAP_THRESHOLD_): otherwise a
peak may hide in memory that an earlier one left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def make_model(folder: Path, layers: int) -> int:
    """Write a random Qwen3 of about 10 M parameters per layer, in several files; return its
    parameters.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=16384, hidden_size=768, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=12, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="500MB")
    (folder / "tokenizer.json").write_text("{}")
    return sum(parameter.numel() for parameter in model.parameters())


def figures(ranks: int = 4, layers: int = 40) -> dict[str, Any]:
    """Return the figures of one run in temporary folders."""
    with tempfile.TemporaryDirectory(prefix="rlearner-memory-") as place:
        model = Path(place) / "model"
        parts = Path(place) / "parts"
        parts.mkdir()
        made = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from bench.nodes_memory import *; print(make_model(Path({str(model)!r}), {layers}))",
            ],
            stdout=subprocess.PIPE,
            check=True,
        )
        found = _measured(ranks, str(Path(place) / "store"), model, parts)
    whole = found[0]["model"]
    return {
        "parameters": int(made.stdout.split()[-1]),  # libraries may have said something before
        "ranks": ranks,
        "peak_load_ratio": round(max(one["load"] for one in found) / whole, 4),
        "trial_ratio": round(max(one["trial"] for one in found) / whole, 4),
        "peak_checkpoint_ratio": round(max(one["checkpoint"] for one in found) / whole, 4),
        "shard_ratio": round(max(one["shard"] for one in found) / whole, 4),
        "load_s": round(max(one["load_s"] for one in found), 2),
        "copy_s": round(max(one["copy_s"] for one in found), 2),
        "write_s": round(max(one["write_s"] for one in found), 2),
    }


def _measured(ranks: int, store: str, model: Path, parts: Path) -> list[dict[str, float]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    module = [sys.executable, "-m", "bench.support.node_memory"]
    processes = [
        subprocess.Popen(
            [*module, str(rank), str(ranks), store, str(model), str(parts)],
            stdout=subprocess.PIPE,
            env=environment,
        )
        for rank in range(ranks)
    ]
    found = []
    for rank, process in enumerate(processes):
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"rank {rank} failed with exit code {process.returncode}")
        found.append(json.loads(output.splitlines()[-1]))
    return found


def main() -> int:
    """Print the figures as one JSON line; exit code 1 beyond the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument(
        "--make", metavar="FOLDER", type=Path, help="only write the model, and print its parameters"
    )
    options = parser.parse_args()
    if options.make is not None:
        print(make_model(options.make, options.layers))
        return 0
    found = figures(options.ranks, options.layers)
    print(json.dumps(found), flush=True)
    return int(max(found["peak_load_ratio"], found["peak_checkpoint_ratio"]) > 0.1)


if __name__ == "__main__":
    sys.exit(main())
