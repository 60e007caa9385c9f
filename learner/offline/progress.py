"""Shows the progress of offline training: a bar on a terminal, otherwise about twenty plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Show = Callable[[int, Mapping[str, float]], None]


@contextmanager
def progress(name: str, first: int, steps: int) -> Iterator[Show]:
    """Yield a function to call with each step, from 1, and the metrics to show.

    Args:
        name: of the pipeline.
        first: completed steps.
    """
    if not sys.stderr.isatty():
        every = max(1, steps // 20)

        def line(step: int, values: Mapping[str, float]) -> None:
            if step % every == 0 or step in (first + 1, steps):
                print(f"step {step}/{steps}  {_text(values)}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(TextColumn(name), *columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=steps, completed=first)
        yield lambda step, values: bars.update(task, completed=step, description=_text(values))


def _text(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
