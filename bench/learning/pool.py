"""Child processes that run arms, one core each; a finished arm is a file and is not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final

from bench.learning.settings import ArmSettings

MAX_FAILURES: Final = 3  # arms that break one after the other before a worker gives up


def result(folder: Path, arm: ArmSettings) -> dict[str, Any] | None:
    """Return the result of an arm if it was run with these settings."""
    try:
        found: dict[str, Any] = json.loads((folder / arm.path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if tuple(found["overrides"]) == arm.overrides else None


def run(
    arms: Sequence[ArmSettings], folder: Path, warm_starts: Mapping[str, str], num_workers: int
) -> None:
    """Run what is missing, in this order, on ``processes`` processes; ``warm_starts`` by context."""
    todo: SimpleQueue[ArmSettings] = SimpleQueue()
    for arm in arms:
        (folder / arm.path).parent.mkdir(parents=True, exist_ok=True)
        if result(folder, arm) is None:
            todo.put(arm)
    threads = [
        threading.Thread(target=_feed, args=(todo, folder, warm_starts))
        for _ in range(min(num_workers, todo.qsize()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _feed(todo: SimpleQueue[ArmSettings], folder: Path, warm_starts: Mapping[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "bench.learning.worker"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        failures = 0
        while failures < MAX_FAILURES:
            try:
                arm = todo.get_nowait()
            except Empty:
                break
            figures: dict[str, Any] = {"arm": asdict(arm), "folder": str(folder)}
            line = json.dumps(figures | {"warm_start": warm_starts[arm.context]})
            print(line, file=child.stdin, flush=True)
            answer = child.stdout.readline()
            if not answer:
                print(
                    f"a worker ended with {child.wait()} in {arm.path}", file=sys.stderr, flush=True
                )
                return
            print(answer.strip(), file=sys.stderr, flush=True)
            failures = failures + 1 if json.loads(answer).get("failed") else 0
        child.stdin.close()
