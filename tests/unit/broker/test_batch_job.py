"""The batch job that a process names in its presence."""

from __future__ import annotations

import pytest

from broker.system.batch_job import batch_job


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "4711"}, "Slurm job 4711"),
        (
            {"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"},
            "Slurm job 4711_2",
        ),
        ({"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711"}, "Slurm job 4713"),
        ({"SLURM_JOB_ID": "x\n4711"}, ""),
        ({"SLURM_JOB_ID": ""}, ""),
    ],
)
def test_the_job_as_squeue_shows_it(environ: dict[str, str], expected: str) -> None:
    assert batch_job(environ) == expected
