"""Shows the progress of offline training: a bar on a terminal, else about twenty lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Show = Callable[[int, Mapping[str, float]], None]


@contextmanager
def show_progress(name: str, first: int, steps: int) -> Iterator[Show]:
    """Yield a function to call with each step, from 1, and the metrics to show.

    Args:
        name: of the pipeline.
        first: completed steps.
    """
    if not sys.stderr.isatty():
        every = max(1, steps // 20)

        def print_line(step: int, values: Mapping[str, float]) -> None:
            if step % every == 0 or step in (first + 1, steps):
                print(f"step {step}/{steps}  {_format_values(values)}", file=sys.stderr, flush=True)

        yield print_line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
    ) as bars:
        task = bars.add_task("", total=steps, completed=first)
        yield lambda step, values: bars.update(
            task, completed=step, description=_format_values(values)
        )


def _format_values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
