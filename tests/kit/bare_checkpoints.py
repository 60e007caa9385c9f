"""Checkpoints without weights, for tests of what reads only their ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from learner.checkpoints import checkpoint

PART = "part-00001-of-00001.safetensors"


def write_bare_checkpoint(checkpoints: Path, ledger: dict[str, Any]) -> None:
    """Write the checkpoint of a ledger's version, with one empty part."""
    own = checkpoints / checkpoint.name_of(ledger["version"]) / "learner"
    own.mkdir(parents=True, exist_ok=True)
    (own / PART).write_bytes(b"")
    body = {"format": checkpoint.FORMAT, "step": ledger["version"], "epoch": 1, "ledger": ledger}
    body["parts"] = [{"file": PART, "size": 0, "digest": ""}]
    (own / "learner.json").write_text(json.dumps(body))
