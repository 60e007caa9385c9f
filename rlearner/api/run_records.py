"""Reads a run's folder as tables: metrics, and the episodes that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from broker.contract import wire
from broker.errors import UserError
from learner.credit.archive import FOLDER, archive_files, read_frames
from learner.reporting.metrics import read_lines
from learner.reporting.transcripts import TranscriptFactory
from learner.run_folder import find_run


def read_metrics(folder: Path) -> Any:
    """Return one row for each step so far, by the names of docs/metrics-reference.md."""
    return make_table(read_lines(folder / "metrics.jsonl"))


def read_samples(folder: Path) -> Any:
    """Return one row for each kept training sequence, oldest first.

    Raises:
        UserError: if the run keeps none.
    """
    place = find_run(str(folder), str(folder.parent))
    if not archive_files(folder / FOLDER):
        raise UserError(f"run {place.name} keeps no samples; start it with samples={{'keep': 200}}")
    return make_table(list(_sample_rows(folder, TranscriptFactory(place.settings.model, folder))))


def _sample_rows(folder: Path, transcripts: TranscriptFactory) -> Iterator[dict[str, Any]]:
    for frame in read_frames(folder / FOLDER):
        group = None if frame.error else frame.record().message
        if not isinstance(group, wire.Group):
            continue
        for trajectory in group.trajectories:
            transcript = transcripts.of(trajectory)
            yield {
                "ticket": group.ticket,
                "domain": group.domain,
                "task": group.task_index,
                "episode": trajectory.episode,
                "prompt": transcript.prompt,
                "text": transcript.text,  # with special tokens, of all turns
                "response": trajectory.response,  # as rewards read it: of the last turn
                "reference": group.reference,
                "reward": trajectory.reward,
                "reward_parts": trajectory.reward_parts,
                "success": trajectory.success,
                "end": trajectory.end,
            }


def make_table(rows: list[Any]) -> Any:
    """Return a pandas DataFrame of mappings, or the list itself where pandas is not installed."""
    if find_spec("pandas") is None:
        return rows
    import pandas

    return pandas.DataFrame(rows)
