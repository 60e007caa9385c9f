"""``rlearner trace``: shows the path of one ticket, from ledger file, records and metrics."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.jetstream.stored_message import peek_message
from broker.system.visible_text import visible, visible_json
from learner.credit import archive, ledger_file, ledger_segments
from learner.credit.archive_trim import missing_reason
from learner.reporting.metrics import read_lines
from learner.run_folder import RunPlace, connect_run, find_run
from rlearner.ops.trace_text import text_of


async def trace_run(options: argparse.Namespace) -> int:
    """Print the path of one ticket and return the exit code."""
    place = find_run(options.run_name, options.dir)
    lines = ticket_lines(place, options.group)
    # The newest record counts; of duplicates only the first was used.
    seq = next(
        (
            line.seq
            for line in reversed(lines)
            if line.seq and line.state not in ("duplicate", "unknown")
        ),
        0,
    )
    record, stored_at, source = await _find_record(options, place.name, place.folder, seq)
    trace = ticket_summary(lines)
    trace["record"] = {"seq": seq, "source": source, "stored_at": stored_at}
    if "step" in trace:
        trace["step_time"] = _step_time(place.folder, trace["step"])
    if record is not None:
        trace |= describe_record(record)
    if options.json:
        print(visible_json(trace))
    else:
        print(visible("\n".join(text_of(trace)), newlines=True))
    return 0


async def _find_record(
    options: argparse.Namespace, run: str, folder: Path, seq: int
) -> tuple[LogRecord | None, str, str]:
    """Return the record that closed the ticket, the time the broker stored it, and its source."""
    if not seq:
        return None, "", "no record yet"
    # Looked for first: a broker that does not answer takes seconds.
    frame = archive.find_frame(folder / archive.FOLDER, seq)
    async with connect_run(options, run, folder) as (bus, problem):
        message = await peek_message(bus, SAMPLES, seq) if bus else None
    # The broker's message comes first, because only it has the time.
    if message is not None:
        return message.record, message.time, "the broker's log"
    if frame is not None:
        return frame.record(), "", "the archive"
    source = f"{missing_reason(folder / archive.FOLDER, seq)}; nor is it in the broker's log"
    return None, "", f"{source}: {problem}" if problem else source


def _step_time(folder: Path, step: int) -> str:
    """Return when the step's line was written, as ISO 8601 in UTC."""
    rows = read_lines(folder / "metrics.jsonl")
    times = [float(row["time"]) for row in rows if row["step"] == step and "time" in row]
    if not times:
        return ""
    return datetime.fromtimestamp(times[0], UTC).isoformat(timespec="milliseconds")


def ticket_lines(place: RunPlace, ticket: int) -> list[ledger_file.LedgerLine]:
    """Return all lines of one ticket, at least one.

    Raises:
        UserError: if there is no such ticket.
    """
    own = []
    newest = 0
    for line in ledger_segments.LedgerLines(place.folder / ledger_segments.FOLDER):
        newest = max(newest, line.ticket)
        if line.ticket == ticket:
            own.append(line)
    if not own:
        raise UserError(f"run {place.name} has no ticket {ticket}; its tickets are 1-{newest}")
    return own


def ticket_summary(lines: list[ledger_file.LedgerLine]) -> dict[str, Any]:
    """Return the ledger file's content about one ticket, given its lines, at least one."""
    duplicates = [line.seq for line in lines if line.state == "duplicate"]
    summary: dict[str, Any] = {"ticket": lines[0].ticket, "state": "open", "duplicates": duplicates}
    for line in lines:
        if line.state == "issued":
            summary |= {
                "domain": line.domain,
                "task_index": line.task_index,
                "min_version": line.min_version,
            }
        elif line.state in (*ledger_file.FINAL, "arrived"):
            summary["state"] = line.state
            if line.oldest >= 0:
                summary |= {"oldest_version": line.oldest, "newest_version": line.newest}
            if line.step:
                summary["step"] = line.step
            if line.reason:
                summary["reason"] = line.reason
    return summary


def describe_record(record: LogRecord) -> dict[str, Any]:
    """Return the content of the record itself."""
    message = record.message
    if isinstance(message, wire.Closed):
        return {"closed_by": message.by, "reason": message.reason, "detail": message.detail}
    if not isinstance(message, wire.Group):
        return {"detail": f"{len(record.data)} bytes that cannot be decoded: {record.error}"}
    return {
        "hub": message.hub,
        "deliveries": message.deliveries,
        "reward_hubs": message.reward_hubs,
        "seconds": {
            "generate": message.generate_s,
            "env_step": message.env_step_s,
            "reward": message.reward_s,
        },
        "prompt": message.prompt,
        "trajectories": [_describe_trajectory(trajectory) for trajectory in message.trajectories],
    }


def _describe_trajectory(trajectory: wire.Trajectory) -> dict[str, Any]:
    return {
        "episode": trajectory.episode,
        "seat": trajectory.seat,
        "tokens": len(trajectory.token_ids.array()),
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "success": trajectory.success,
        "end": trajectory.end,
        "teacher": _describe_teacher(trajectory),
        "spans": sampled_spans(trajectory),
    }


def _describe_teacher(trajectory: wire.Trajectory) -> dict[str, Any] | None:
    """Return who scored a trajectory, and the mean divergence from it in nats per token."""
    teacher = trajectory.teacher
    if teacher is None:
        return None
    sampled = trajectory.loss_mask.array().astype(bool)
    gap = (trajectory.logprobs.array() - teacher.logprobs.array())[sampled]
    kl = float(gap.mean()) if len(gap) else 0.0
    return {"policy": teacher.policy, "version": teacher.version, "kl": round(kl, 4)}


def sampled_spans(trajectory: wire.Trajectory) -> list[dict[str, Any]]:
    """Return the spans of sampled tokens, cut at turns and versions; ``end`` is exclusive."""
    pairs = trajectory.version_runs.array().reshape(-1, 2)
    runs = [(int(version), int(count)) for version, count in pairs if count > 0]
    rows: list[dict[str, Any]] = []
    for turn in trajectory.turns:
        position = turn.start
        while position < turn.end and runs:
            version, count = runs.pop(0)
            length = min(count, turn.end - position)
            if length < count:  # the run goes on in the next turn
                runs.insert(0, (version, count - length))
            row = {
                "start": position,
                "end": position + length,
                "server": turn.server,
                "policy_version": version,
                "reward": turn.reward,
                "valid": turn.valid,
                "finish_reason": turn.finish_reason,
            }
            rows.append(row)
            position += length
    return rows
