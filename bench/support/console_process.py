"""A console in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil


@asynccontextmanager
async def console(root: Path, run: str) -> AsyncIterator[tuple[str, str, psutil.Process]]:
    """Yield address, link and process of a console."""
    cache = tempfile.mkdtemp()
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")
    }
    words = ["-m", "rlearner.cli", "console", run, "--dir", str(root), "--port", "0"]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        stdout=asyncio.subprocess.PIPE,
        env=environment | {"XDG_RUNTIME_DIR": cache},
    )
    assert child.stdout is not None
    try:
        address = ""
        while not address:
            found = re.search(r" at (http://\S+), ", (await child.stdout.readline()).decode())
            address = found[1] if found else ""
        file = Path(cache, "rlearner", f"console-{address.rpartition(':')[2]}.url")
        await until(file.exists)
        yield address, (await asyncio.to_thread(file.read_text)).strip(), psutil.Process(child.pid)
    finally:
        child.terminate()
        await child.wait()


async def until(holds: Callable[[], bool]) -> None:
    while True:
        if holds():
            return
        await asyncio.sleep(0.02)
