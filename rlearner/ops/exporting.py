"""``rlearner export``: writes a checkpoint's model as safetensors in Hugging Face format."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from broker.errors import UserError
from broker.system.visible_text import visible_json
from learner.checkpoints.checkpoint import (
    Checkpoint,
    list_checkpoints,
    name_of,
    newest_checkpoint,
    read_checkpoint,
)
from learner.checkpoints.export import export_model
from learner.run_folder import find_run


async def export_run(options: argparse.Namespace) -> int:
    """Export and return the exit code."""
    place = find_run(options.run_name, options.dir)
    folder = place.folder / "checkpoints"
    checkpoint: Checkpoint | None
    if options.step is None:
        checkpoint = newest_checkpoint(folder)
    else:
        checkpoint = _checkpoint_of_step(folder, options.step)
    if checkpoint is None:
        raise UserError(f"{folder}: there is no checkpoint yet")
    step = checkpoint.step
    out = Path(options.out) if options.out else place.folder / "exported" / name_of(step)
    # In a thread, because it writes for minutes and the event loop must receive signals.
    await asyncio.to_thread(export_model, checkpoint, out, int(options.max_shard_gib * 2**30))
    files = sorted(file.name for file in out.glob("*.safetensors"))
    if options.json:
        print(visible_json({"run": place.name, "step": step, "folder": str(out), "files": files}))
    else:
        print(f"{out}: step {step}, {', '.join(files)}")
    return 0


def _checkpoint_of_step(folder: Path, step: int) -> Checkpoint:
    paths = {path.name: path for path in list_checkpoints(folder)}
    if name_of(step) not in paths:
        raise UserError(
            f"--step {step}: no such checkpoint is kept; there is {', '.join(paths) or 'none'}"
        )
    return read_checkpoint(paths[name_of(step)])
