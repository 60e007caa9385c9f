"""What a user may want to do after ``rlearner up``, by what the run is."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from broker.contract.wire import PlainSettings
from broker.errors import UserError
from broker.settings.run_settings import stored_value
from learner.resume_checks import read_settings
from rlearner.ops.drawing import Row

MOST: Final = 3


def next_steps(folder: Path, lines: Sequence[Row], resume: str) -> list[str]:
    """Return at most three lines, the most useful first.

    Args:
        folder: of the run.
        lines: of metrics.jsonl.
        resume: how to continue the run, or to begin it again.
    """
    if not lines:
        return [resume]
    settings = _settings(folder)
    newest = max((folder / "checkpoints").glob("step-*"), default=None)
    curves = f"see the curves: tensorboard --logdir {_quote(folder / 'tensorboard')}"
    steps = stored_value(settings, "train", "steps")
    if steps is None or lines[-1]["step"] < steps:
        return [resume, curves]
    texts = []
    if newest is not None and stored_value(settings, "model", "path"):
        texts.append(_use_line(folder, newest))
    if newest is not None and not any("eval/success_rate" in line for line in lines):
        texts.append(
            f"measure it on held-out tasks: rlearner eval {_quote(newest)} {_quote(folder)}"
        )
    else:
        texts.append(curves)
    return [*texts, resume][:MOST]


def _use_line(folder: Path, checkpoint: Path) -> str:
    """Return where the trained weights of a pretrained model are for other programs."""
    adapter = checkpoint / "adapter"
    if adapter.is_dir():
        return f"load the adapter with peft or vLLM: {_quote(adapter)}"
    if any(checkpoint.glob("*.safetensors")):
        return f"load the model with transformers or vLLM: {_quote(checkpoint)}"
    return f"write the model for transformers or vLLM: rlearner export {_quote(folder)}"


def _settings(folder: Path) -> PlainSettings:
    try:
        return read_settings(folder) or {}
    except UserError:
        return {}


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
