"""The commit that is measured."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
MANIFEST: Final = ROOT / "bench" / "manifest.json"  # install.sh leaves the bundle's there


@cache
def current_commit() -> str:
    """Return the commit of the clone or of the bundle from which this was installed; empty if
    neither tells.
    """
    if MANIFEST.is_file():
        return str(json.loads(MANIFEST.read_text(encoding="utf-8"))["commit"])
    if shutil.which("git") is None:
        return ""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
