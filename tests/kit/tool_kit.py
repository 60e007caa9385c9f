"""What tests of tools share: a file of tasks, servers, and the domain that uses them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

RAW_SERVER = str(Path(__file__).parent / "raw_tool_server.py")


def task_file(folder: Path) -> str:
    path = folder / "tasks.jsonl"
    rows = (f'{{"question": "{n} + {n} = ?", "answer": "{2 * n}"}}\n' for n in range(20))
    path.write_text("".join(rows), encoding="utf-8")
    return str(path)


def raw_server(*arguments: str, **args: Any) -> dict[str, Any]:
    """The section of a source that runs ``raw_tool_server``."""
    return {"kind": "mcp", "args": {"command": [sys.executable, RAW_SERVER, *arguments], **args}}


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
