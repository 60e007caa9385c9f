"""Reads one group from the archive token by token, and its provenance."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from broker.contract import wire
from broker.contract.wire import PlainSettings
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.settings.run_settings import stored_section
from broker.settings.schema.model import ModelSection
from learner.algorithm.token_figures import TokenFigures
from learner.credit import archive
from learner.credit.archive_trim import missing_reason
from learner.credit.token_files import read_figures
from learner.reporting.transcripts import load_tokenizer
from rlearner.console.index import series, tickets
from rlearner.console.index.advantages import group_advantages
from rlearner.console.index.answers import GroupView, Piece, Provenance, Token, TrajectoryView
from rlearner.console.index.records import read_record
from rlearner.console.index.runs import settings
from rlearner.ops.showing import trajectory_of
from rlearner.ops.trace_text import text_of
from rlearner.ops.tracing import describe_record, ticket_summary
from rlearner_text.tokenizer import Tokenizer

ARCHIVE: Final = "the archive"
KEPT_TOKENIZERS: Final = 4

_loading = threading.Lock()  # answers come from several threads
_tokenizers: OrderedDict[tuple[str, int], tuple[Tokenizer | None, str]] = OrderedDict()


def group(connection: sqlite3.Connection, folder: Path, ticket: int) -> GroupView:
    way, record = provenance(connection, folder, ticket)
    if record is None:
        if way.seq:
            reason = missing_reason(folder / archive.FOLDER, way.seq)
            raise UserError(f"record {way.seq} is {reason}")
        raise UserError(f"ticket {ticket} has no record yet")
    if not isinstance(record.message, wire.Group):
        summary = describe_record(record)
        raise UserError(
            f"ticket {ticket} has no group: {summary.get('reason', 'malformed')}, "
            f"{summary.get('detail')}"
        )
    config = settings(folder)
    tokenizer, origin = _run_tokenizer(config, folder)
    message = record.message
    advantages, why_none = group_advantages(connection, folder, config, message, way)
    unavailable = {"advantage": why_none} if why_none else {}
    figures: list[TokenFigures] = []
    try:
        figures = read_figures(folder / archive.FOLDER, way.step, ticket)
    except UserError as error:
        unavailable |= dict.fromkeys(("entropy", "ratio"), str(error))
    views = [
        _view_trajectory(
            i,
            trajectory,
            tokenizer,
            advantages[i] if advantages else None,
            figures[i] if i < len(figures) else None,
        )
        for i, trajectory in enumerate(message.trajectories)
    ]
    return GroupView(
        ticket,
        way,
        message.prompt,
        reference=message.reference,
        temperature=message.temperature,
        tokenizer=origin,
        trajectories=views,
        unavailable=unavailable,
        frames=list(message.frames),
    )


def provenance(
    connection: sqlite3.Connection, folder: Path, ticket: int
) -> tuple[Provenance, LogRecord | None]:
    lines = tickets.lines_of(connection, ticket)
    if not lines:
        newest = connection.execute("SELECT max(ticket) FROM tickets").fetchone()[0]
        bounds = f"its tickets are 1-{newest}" if newest else "it has none yet"
        raise UserError(f"run {folder.name} has no ticket {ticket}; {bounds}")
    seq = tickets.record_of(lines)
    summary = ticket_summary(lines)
    record = read_record(connection, folder, seq) if seq else None
    source = ARCHIVE
    if record is None:
        reason = missing_reason(folder / archive.FOLDER, seq)
        source = reason if seq else "no record yet"
    summary |= {"record": {"seq": seq, "source": source, "stored_at": ""}}
    if step := summary.get("step", 0):
        time = series.time_of(connection, step)
        summary["step_time"] = (
            datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds") if time else ""
        )
    if record is not None:
        summary |= describe_record(record)
    way = Provenance(
        ticket,
        summary["state"],
        summary.get("domain", ""),
        task_index=summary.get("task_index", -1),
        step=step,
        seq=seq,
        text=text_of(summary),
    )
    return way, record


def _run_tokenizer(config: PlainSettings, folder: Path) -> tuple[Tokenizer | None, str]:
    """Return the run's tokenizer and its path, or None and the reason; keeps a few loaded."""
    try:
        key = str(folder), (folder / "config.yaml").stat().st_mtime_ns
    except OSError:
        key = str(folder), 0
    # Loading takes seconds, so of several threads that need a tokenizer only the first loads it.
    with _loading:
        if key not in _tokenizers:
            model = stored_section(config, "model", ModelSection)
            _tokenizers[key] = load_tokenizer(model, folder)
            while len(_tokenizers) > KEPT_TOKENIZERS:
                _tokenizers.popitem(last=False)
        return _tokenizers[key]


def _view_trajectory(
    ordinal: int,
    trajectory: wire.Trajectory,
    tokenizer: Tokenizer | None,
    advantages: Mapping[int, float] | None,
    figures: TokenFigures | None,
) -> TrajectoryView:
    view = trajectory_of(trajectory, tokenizer, figures)
    mask = trajectory.loss_mask.array()
    pieces = []
    for piece in view["pieces"]:
        if "turn" not in piece:
            pieces.append(Piece(0, piece["start"], piece["end"], piece["text"], []))
            continue
        sampled = [
            Token(
                position=token["position"],
                id=token["id"],
                text=token["text"],
                mask=bool(mask[token["position"]]),
                logprob=token["logprob"],
                version=token["policy_version"],
                reward=token["reward"],
                advantage=None if advantages is None else advantages.get(token["position"]),
                entropy=token.get("entropy"),
                ratio=token.get("ratio"),
            )
            for token in piece["tokens"]
        ]
        pieces.append(
            Piece(
                piece["turn"],
                piece["start"],
                piece["end"],
                text=piece["text"],
                tokens=sampled,
                server=piece["server"],
                version=piece["policy_version"],
                reward=piece["reward"],
                valid=piece["valid"],
                finish_reason=piece["finish_reason"],
                logprob=piece["logprob"],
            )
        )
    parts = {name: value for name, value in trajectory.reward_parts.items() if "/" not in name}
    notes = {name: value for name, value in trajectory.reward_parts.items() if "/" in name}
    return TrajectoryView(
        ordinal,
        trajectory.episode,
        trajectory.reward,
        reward_parts=parts,
        notes=notes,
        success=trajectory.success,
        end=trajectory.end,
        greedy=trajectory.greedy,
        response=trajectory.response,
        metrics=dict(trajectory.metrics),
        pieces=pieces,
    )
