"""Shared parts of the scripts: options, the generated model, formulas, the last line."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from broker.errors import UserError
from broker.system.gpus import existing

# Dense bf16 multiply-adds a second, counted as two operations each, by the vendor's data sheets;
# the first name that is part of the device's counts. Sparse figures, which are twice as large, are
# nowhere.
PEAK_FLOPS: Final[Mapping[str, float]] = {
    "B200": 2.25e15, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H20": 148e12, "A100": 312e12, "A10G": 70e12,
    "A10": 125e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
}  # fmt: skip


# variable that names a folder in which steps share generated models
MODELS: Final = "RL_BENCH_MODELS"


@dataclass(frozen=True)
class ModelShape:
    """A Qwen3 model: the sizes that decide its parameters and operations."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    positions: int


# Qwen3-0.6B's, of which 0.44 billion are in the blocks
HALF_BILLION: Final = ModelShape(1024, 28, 16, 8, 128, 3072, 151_936, 32_768)
TINY: Final = ModelShape(64, 2, 2, 2, 32, 128, 512, 2048)


def num_parameters(shape: ModelShape) -> tuple[int, int]:
    """Return the parameters of the blocks and of the tied embedding, norms included."""
    # q, o, k, v; norms of q and k
    attention = (
        shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads) + 2 * shape.head_dim
    )
    block = attention + 3 * shape.hidden * shape.intermediate + 2 * shape.hidden
    return shape.layers * block + shape.hidden, shape.vocab * shape.hidden


def train_flops_per_token(shape: ModelShape, context: float, *, causal: bool = False) -> float:
    """Operations of forward and backward pass per token: 6 N + 12 L H Q T (Chowdhery et al. 2022,
    PaLM, appendix B).

    N counts the blocks and the output projection, not the look-up of the embedding; T is the mean
    length of a sequence. Nothing that is computed again counts.

    Args:
        causal: count half of the attention, 6 L H Q T: the part that a causal kernel computes.
    """
    blocks, output = num_parameters(shape)
    attention = (6.0 if causal else 12.0) * shape.layers * shape.heads * shape.head_dim * context
    return 6.0 * (blocks + output) + attention


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None) -> float | None:
    """Return the model FLOPs utilization, or None if the peak of the device is unknown."""
    return None if not peak_flops else tokens_per_s * flops_per_token / peak_flops


def peak_flops(device: str) -> float | None:
    return next((flops for name, flops in PEAK_FLOPS.items() if name in device), None)


def parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts take."""
    first, _, rest = (text or "").partition("\n")
    made = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument(
        "--tiny",
        action="store_true",
        help="a small model and little work, to see that the script runs",
    )
    return made


def engine_options(made: argparse.ArgumentParser) -> None:
    """Which engine, with which settings."""
    made.add_argument(
        "--engine", default="hf", help="a name of the registry in rollout/engines (%(default)s)"
    )
    made.add_argument(
        "--engine-args",
        type=json.loads,
        default={},
        metavar="JSON",
        help="rollout.engine_args of that engine",
    )


def begin(options: argparse.Namespace) -> str:
    """Prepare the device and return its name; raise UserError if there is no GPU that this torch
    can use.
    """
    if options.device == "cpu":
        if not options.tiny:
            raise UserError("--device cpu is for --tiny: these are measurements of a GPU")
        return "cpu"
    if not existing():
        raise UserError(
            "this machine has no NVIDIA GPU; --device cpu --tiny shows that the script runs"
        )
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} cannot use the GPU here; rlearner doctor says why"
        )
    return str(torch.cuda.get_device_name(0))


def make_model(
    folder: str | Path, shape: ModelShape, *, dtype: str = "bfloat16", seed: int = 0
) -> str:
    """Write a Qwen3 with random weights and a tokenizer of single characters; return the folder.

    If the variable ``RL_BENCH_MODELS`` names a folder, the model lies there, and a later call finds
    it.
    """
    if not (shared := os.environ.get(MODELS)):
        return _write_model(Path(folder), shape, dtype, seed)
    key = hashlib.sha256(json.dumps([asdict(shape), dtype, seed]).encode()).hexdigest()[:12]
    place = Path(shared) / key
    if not (place / "complete").exists():
        _write_model(place, shape, dtype, seed)
        (place / "complete").touch()
    return str(place / "model")


def _write_model(folder: Path, shape: ModelShape, dtype: str, seed: int) -> str:
    import torch
    import transformers

    from rlearner_text.config import TinyModel
    from rlearner_text.hub import copy_tokenizer
    from rlearner_text.tiny import build_tiny

    build_tiny(
        folder / "tokenizer",
        TinyModel(hidden_size=8, num_layers=1, head_dim=4, intermediate_size=8),
    )
    config = transformers.Qwen3Config(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=shape.positions, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    # drawing 0.6 billion numbers takes a CPU long
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.Qwen3ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder / "model")
    copy_tokenizer(str(folder / "tokenizer"), folder / "model")
    return str(folder / "model")


def settle(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def seconds(
    work: Callable[[], object], device: str, *, repeats: int = 7, warm_up: int = 2
) -> list[float]:
    """Return the seconds of each run without the warm-up runs."""
    taken = []
    for turn in range(warm_up + repeats):
        settle(device)
        began = time.perf_counter()
        work()
        settle(device)
        if turn >= warm_up:
            taken.append(time.perf_counter() - began)
    return taken


def show(figures: Mapping[str, Any]) -> None:
    """Print figures as one line of JSON, which counts if the step does not reach its end."""
    print(json.dumps(dict(figures)), flush=True)


def finish(
    name: str,
    device: str,
    shape: ModelShape,
    figures: Mapping[str, Any],
    checks: Mapping[str, bool],
) -> int:
    failed = [check for check, held in checks.items() if not held]
    blocks, embedding = num_parameters(shape)
    line = {
        "bench": f"bench.gpu.{name}", "device": device, "model": asdict(shape) | {"parameters": blocks + embedding},
        **figures, "checks": dict(checks), "failed": failed,
    }  # fmt: skip
    print(json.dumps(line))
    return 1 if failed else 0


def run(
    body: Callable[[argparse.Namespace, str], int],
    made: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse the arguments, check the device and measure; return the exit code."""
    options = made.parse_args(arguments)
    try:
        return body(options, begin(options))
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
