"""Names the batch job that this process runs in, so that others can say whose process it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

TASK: Final = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")  # of a job array
JOB: Final = "SLURM_JOB_ID"


def batch_job(environ: Mapping[str, str] = os.environ) -> str:
    """Return the Slurm job of this process as ``squeue`` names it; empty outside."""
    array, task = (environ.get(name, "") for name in TASK)
    number = f"{array}_{task}" if array.isdecimal() and task.isdecimal() else environ.get(JOB, "")
    return f"Slurm job {number}" if number.replace("_", "").isdecimal() else ""
