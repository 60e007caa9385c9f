"""Sends sample texts and animated pictures of episodes to the trackers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.errors import UserError
from learner.algorithm.episodes import final_trajectories
from learner.config import TrackersSection
from learner.reporting.trackers import TrackerGroup
from learner.reporting.transcripts import Transcript, TranscriptFactory

log = logging.getLogger(__name__)

# Evaluated episodes per domain that solved their task, and as many that did not.
EPISODES_PER_OUTCOME: Final = 2
# Of tables.
COLUMNS: Final = ("step", "domain", "task", "episode", "reward", "success", "prompt", "text")
RENDER_TIMEOUT_S: Final = 60.0


class EpisodeShowcase:
    """Sender of texts and pictures to the trackers.

    Args:
        folder: of the run.
    """

    def __init__(
        self,
        trackers: TrackerGroup,
        section: TrackersSection,
        transcripts: TranscriptFactory,
        folder: Path,
    ) -> None:
        self._trackers = trackers
        self._section = section
        self._transcripts = transcripts
        self._folder = folder
        self._newest: dict[str, wire.Group] = {}  # by domain, of those that were accepted
        self._undrawable: set[str] = set()  # domains without pictures

    def accepted(self, group: wire.Group) -> None:
        """Keep the newest group of each domain."""
        self._newest[group.domain] = group

    def step_completed(self, step: int) -> None:
        """Show a training episode of each domain, every ``trackers.texts_every`` steps; blocks."""
        every = self._section.texts_every
        if not every or step % every:
            return
        texts = {}
        rows = []
        # Decoding all episodes of a step takes long.
        max_episodes = None if self._trackers.take("table") else 1
        for domain, group in sorted(self._newest.items()):
            heading = f"task {group.task_index}, ticket {group.ticket}"
            transcripts = [
                self._transcripts.of(episode)
                for episode in final_trajectories(group)[:max_episodes]
            ]
            texts[f"samples/{domain}"] = transcripts[0].markdown(heading)
            rows += [
                _table_row(step, domain, group.task_index, episode=number, transcript=transcript)
                for number, transcript in enumerate(transcripts)
            ]
        self._newest.clear()
        self._trackers.texts(step, texts)
        self._trackers.table(step, "trajectories/train", COLUMNS, rows)

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show evaluated episodes of each domain, from rows as in ``evals/``; blocks."""
        rows_by_domain: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            rows_by_domain[row["domain"]].append(row)
        ordered = sorted(rows_by_domain.items())
        if self._section.texts_every:
            selection = {domain: _select_rows(domain_rows) for domain, domain_rows in ordered}
            texts = {f"evaluated/{domain}": _to_markdown(own) for domain, own in selection.items()}
            self._trackers.texts(step, texts)
            table = [
                _table_row(
                    step, domain, row["task_index"], episode=0, transcript=_row_transcript(row)
                )
                for domain, selected_rows in selection.items()
                for row in selected_rows
            ]
            self._trackers.table(step, "trajectories/eval", COLUMNS, table)
        for domain, domain_rows in ordered:
            drawable = next((row for row in domain_rows if row["frames"]), None)
            if self._section.pictures and drawable is not None and domain not in self._undrawable:
                self._draw(step, drawable)

    def _draw(self, step: int, row: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place, "episode.gif")
            try:
                render_episode(self._folder, row, step, out)
            except UserError as error:
                log.info("no pictures of domain %s: %s", row["domain"], error)
                self._undrawable.add(row["domain"])
                return
            self._trackers.picture(step, f"episodes/{row['domain']}", out.read_bytes())


def _select_rows(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few episodes of one domain, solved and not."""
    solved = [row for row in rows if row["success"][0]][:EPISODES_PER_OUTCOME]
    return solved + [row for row in rows if not row["success"][0]][:EPISODES_PER_OUTCOME]


def _row_transcript(row: Mapping[str, Any]) -> Transcript:
    return Transcript(row["prompt"], row["text"], row["reward"][0], row["success"][0])


def _to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return evaluated episodes as Markdown."""
    return "\n\n".join(_row_transcript(row).markdown(f"task {row['task_index']}") for row in rows)


def _table_row(
    step: int, domain: str, task: int, *, episode: int, transcript: Transcript
) -> tuple[Any, ...]:
    """Return the values of ``COLUMNS``."""
    return (
        step,
        domain,
        task,
        episode,
        float(transcript.reward),
        bool(transcript.success),
        transcript.prompt,
        transcript.text,
    )


def render_episode(folder: Path, row: Mapping[str, Any], step: int, out: Path) -> None:
    """Draw the first episode of an evaluated task with ``envhub render``, in a separate process.

    Args:
        folder: of the run, for its settings.
        row: of ``evals/``, with frames.
        step: the optimizer step that was evaluated.
        out: path of the GIF.

    Raises:
        UserError: if the environment draws no pictures, cannot be loaded here, or takes too long.
    """
    try:
        start, *moves = (json.loads(frame) for frame in row["frames"])
        actions = [frame["action"] for frame in moves]
        task = str(start["task_index"])
        seed = str(start["seed"])
        split = str(start["split"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"its hub wrote frames of an unknown format: {type(error).__name__}: {error}"
        ) from None
    command = [sys.executable, "-m", "envhub.cli", "render", str(folder / "config.yaml")]
    command += ["--domain", row["domain"], "--task-index", task, "--seed", seed, "--split", split]
    command += ["--actions", json.dumps(actions), "--title", f"step {step}, task {task}"]
    command += ["--out", str(out)]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            # An environment may print anything.
            errors="replace",
            check=False,
            timeout=RENDER_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"drawing took longer than {RENDER_TIMEOUT_S:g} s") from None
    if result.returncode:
        raise UserError(
            (result.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        )
