"""Task folders for tests, and a host whose sandboxes are those of the provider ``namespace``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from envhub.tasks.settings import TaskArgs

FILES: Mapping[str, str] = {
    "task.toml": 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 5.0\n',
    "instruction.md": "Write yes to /app/answer.txt.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\n",
    "tests/test.sh": (
        "#!/bin/sh\n"
        'if [ -f /app/answer.txt ] && [ "$(cat /app/answer.txt)" = yes ]; then r=1; else r=0; fi\n'
        "echo $r > /logs/verifier/reward.txt\n"
    ),
    "solution/solve.sh": "#!/bin/sh\necho yes > /app/answer.txt\n",
}


def write_task(folder: Path, **files: str | None) -> Path:
    """Write a task; ``files`` replaces files by their path, None leaves one out."""
    for name, text in {**FILES, **files}.items():
        if text is None:
            continue
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if path.suffix == ".sh":
            path.chmod(0o755)
    return folder


def task_args(folder: Path, **fields: object) -> TaskArgs:
    """Return the settings of a domain with the tasks of a folder, on the host's own system."""
    settings = {"path": str(folder), "images": {"*": "host"}, "eval_share": 0.0, **fields}
    return TaskArgs.model_validate(settings)
