"""``rlearner sft MODEL DATA OUT``: supervised fine-tuning from the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from broker.errors import UserError

if TYPE_CHECKING:
    from learner.pipelines.sft import OnStep


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the ``sft`` command to the subparsers of ``rlearner``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "sft",
        help="fine-tune a model on conversations",
        description="Supervised fine-tuning: trains on what the assistant says in each conversation and writes a Hugging Face folder.",
    )
    parser.add_argument("model", help="Hugging Face folder or hub name")
    parser.add_argument("data", help='JSONL, one {"messages": [{"role": "user", "content": …}, …]} a line')
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--steps", type=_positive, default=300, help="optimizer steps (300)")
    parser.add_argument("--batch-size", type=_positive, default=32, help="conversations of one step (32)")
    parser.add_argument("--lr", type=float, default=1e-5, help="peak learning rate (1e-5; 1e-3 suits models made from nothing)")
    parser.add_argument("--warmup-steps", type=int, default=None, help="linear warm-up of the learning rate (a twentieth of the steps)")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW, on matrices (0)")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="gradient clipping, 0 is off (1)")
    parser.add_argument("--micro-batch-tokens", type=_positive, default=8192, help="padded tokens of one forward pass (8192)")
    parser.add_argument("--seed", type=int, default=0, help="order of the data (0)")
    parser.add_argument("--num-threads", type=int, default=0, help="torch threads, 0 leaves the default (0)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of weights and arithmetic")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 (auto)")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the model's folder bring code")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it; 0, or 2 with one line on stderr for bad input."""
    try:
        _check(args)
        result = _train(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    print(
        f"wrote {args.out}: loss {result['first_loss']:.3f} -> {result['loss']:.3f} in {result['steps']:.0f} steps, "
        f"{result['examples']:.0f} conversations, {result['epochs']:.1f} epochs, "
        f"{result['tokens'] / max(result['seconds'], 1e-9):,.0f} tokens/s, {result['seconds']:.1f} s"
    )
    return 0


def _train(args: argparse.Namespace) -> dict[str, float]:
    from learner.pipelines.sft import run_sft  # here, because it imports torch

    options = {k: v for k, v in vars(args).items() if k in _OPTIONS}
    with _progress(args.steps) as on_step:
        return run_sft(args.model, args.data, args.out, on_step=on_step, **options)


_OPTIONS = (
    "steps", "batch_size", "lr", "warmup_steps", "weight_decay", "max_grad_norm", "micro_batch_tokens", "seed", "num_threads",
    "dtype", "device", "trust_remote_code",
)  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    for name, smallest, strict in (
        ("lr", 0, True), ("weight_decay", 0, False), ("max_grad_norm", 0, False), ("warmup_steps", 0, False), ("seed", 0, False),
        ("num_threads", 0, False),
    ):  # fmt: skip
        value = getattr(args, name)
        if value is not None and not (value > smallest or (value == smallest and not strict)):
            raise UserError(
                f"--{name.replace('_', '-')}: {value} is not allowed; it must be {'above' if strict else 'at least'} {smallest}"
            )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not allowed; it must be at least 1")
    return value


@contextmanager
def _progress(steps: int) -> Iterator[OnStep]:
    """A bar on a terminal, otherwise about twenty plain lines."""
    if not sys.stderr.isatty():
        every = max(1, steps // 20)

        def line(step: int, metrics: dict[str, float]) -> None:
            if step % every == 0 or step in (1, steps):
                values = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
                print(f"step {step}/{steps}  {values}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("sft"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=steps)

        def bar(step: int, metrics: dict[str, float]) -> None:
            progress.update(
                task,
                completed=step,
                description=f"loss {metrics['loss']:.3f}  lr {metrics['lr']:.2e}  {metrics['tokens_per_s']:,.0f} tok/s",
            )

        yield bar
