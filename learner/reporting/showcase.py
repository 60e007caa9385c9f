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
from learner.algorithm.episodes import episodes
from learner.config import TrackersSection
from learner.reporting.trackers import TrackerGroup
from learner.reporting.transcripts import Transcript, TranscriptFactory

log = logging.getLogger(__name__)

EACH: Final = 2  # evaluated episodes per domain that solved their task, and as many that did not
# of tables
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
        self._undrawn: set[str] = set()  # domains without pictures

    def accepted(self, group: wire.Group) -> None:
        """Keep the newest group of each domain."""
        self._newest[group.domain] = group

    def step_completed(self, step: int) -> None:
        """Show one training episode of each domain, every ``trackers.texts_every`` steps; blocks."""
        every = self._section.texts_every
        if not every or step % every:
            return
        texts = {}
        rows = []
        # decoding all episodes of a step takes long
        shown = None if self._trackers.take("table") else 1
        for domain, group in sorted(self._newest.items()):
            heading = f"task {group.task_index}, ticket {group.ticket}"
            played = [self._transcripts.of(episode) for episode in episodes(group)[:shown]]
            texts[f"samples/{domain}"] = played[0].markdown(heading)
            rows += [
                _row(step, domain, group.task_index, number, one)
                for number, one in enumerate(played)
            ]
        self._newest.clear()
        self._trackers.texts(step, texts)
        self._trackers.table(step, "trajectories/train", COLUMNS, rows)

    def evaluated(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show episodes of each domain, evaluated after a step, from rows as in ``evals/``; blocks."""
        of_domain: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in rows:
            of_domain[row["domain"]].append(row)
        ordered = sorted(of_domain.items())
        if self._section.texts_every:
            chosen = {domain: _chosen(own) for domain, own in ordered}
            self._trackers.texts(
                step, {f"evaluated/{domain}": _texts(own) for domain, own in chosen.items()}
            )
            rows_of = [(domain, row) for domain, own in chosen.items() for row in own]
            table = [_row(step, domain, row["task_index"], 0, _of(row)) for domain, row in rows_of]
            self._trackers.table(step, "trajectories/eval", COLUMNS, table)
        for domain, own in ordered:
            drawable = next((row for row in own if row["frames"]), None)
            if self._section.pictures and drawable is not None and domain not in self._undrawn:
                self._draw(step, drawable)

    def _draw(self, step: int, row: Mapping[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as place:
            out = Path(place, "episode.gif")
            try:
                render(self._folder, row, step, out)
            except UserError as error:
                log.info("no pictures of domain %s: %s", row["domain"], error)
                self._undrawn.add(row["domain"])
                return
            self._trackers.picture(step, f"episodes/{row['domain']}", out.read_bytes())


def _chosen(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a few episodes of one domain, solved and not."""
    solved = [row for row in rows if row["success"][0]][:EACH]
    return solved + [row for row in rows if not row["success"][0]][:EACH]


def _of(row: Mapping[str, Any]) -> Transcript:
    return Transcript(row["prompt"], row["text"], row["reward"][0], row["success"][0])


def _texts(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return evaluated episodes as Markdown."""
    return "\n\n".join(_of(row).markdown(f"task {row['task_index']}") for row in rows)


def _row(step: int, domain: str, task: int, episode: int, shown: Transcript) -> tuple[Any, ...]:
    """Return the values of ``COLUMNS``."""
    return (
        step,
        domain,
        task,
        episode,
        float(shown.reward),
        bool(shown.success),
        shown.prompt,
        shown.text,
    )


def render(folder: Path, row: Mapping[str, Any], step: int, out: Path) -> None:
    """Draw the first episode of an evaluated task with ``envhub render``, in a separate process.

    Args:
        folder: of the run, for its settings.
        row: of ``evals/``, with frames.
        step: the optimizer step that was evaluated.
        out: path of the GIF.

    Raises:
        UserError: if the environment draws no pictures, cannot be loaded on this machine, or takes
            too long.
    """
    try:
        start, *rest = (json.loads(frame) for frame in row["frames"])
        actions = [frame["action"] for frame in rest]
        task = str(start["task_index"])
        seed = str(start["seed"])
        split = str(start["split"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"its hub wrote frames of an unknown format: {type(error).__name__}: {error}"
        ) from None
    place = ["--domain", row["domain"], "--task-index", task, "--seed", seed, "--split", split]
    what = ["--actions", json.dumps(actions), "--title", f"step {step}, task {task}"]
    config = str(folder / "config.yaml")
    command = [
        sys.executable,
        "-m",
        "envhub.cli",
        "render",
        config,
        *place,
        *what,
        "--out",
        str(out),
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=RENDER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"drawing took longer than {RENDER_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise UserError(
            (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("error: ")
        )
