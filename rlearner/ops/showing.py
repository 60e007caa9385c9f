"""``rlearner show``: prints one group's trajectories by turn, with reward, logprob and policy
version.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from broker.contract import wire
from broker.contract.streams import SAMPLES
from broker.errors import ConfigError, UserError
from broker.jetstream.bus import LogRecord
from broker.jetstream.stored_message import peek
from broker.system.visible_text import visible, visible_json
from learner.algorithm.token_figures import TokenFigures
from learner.credit import archive
from learner.credit.token_files import read_figures
from learner.reporting.transcripts import decode, load_tokenizer
from learner.run_folder import RunPlace, connect_run, find_run
from rlearner.ops.tracing import describe, spans, ticket_lines, ticket_summary
from rlearner_text.tokenizer import Tokenizer

NO_RECORD: Final = ("duplicate", "unknown")


async def show_run(options: argparse.Namespace) -> int:
    """Print one group and return the exit code."""
    place = find_run(options.run_name, options.dir)
    own = ticket_lines(place, options.group)
    seq = next((line.seq for line in reversed(own) if line.seq and line.state not in NO_RECORD), 0)
    record = await _record(options, place, seq)
    found = ticket_summary(own)
    if not isinstance(record.message, wire.Group):
        told = describe(record)
        reason = told.get("reason", "malformed")
        detail = told.get("detail") or "no details"
        raise UserError(f"ticket {options.group} has no group: {reason}, {detail}")
    tokenizer, found["tokenizer"] = load_tokenizer(place.config, place.folder)
    figures = _figures(place.folder, found)
    chosen = _chosen(record.message, options.episode)
    found["trajectories"] = [trajectory_of(one, tokenizer, figures.get(i)) for i, one in chosen]
    print(
        visible_json(found)
        if options.json
        else visible("\n".join(text_of(found, options.tokens)), newlines=True)
    )
    return 0


async def _record(options: argparse.Namespace, place: RunPlace, seq: int) -> LogRecord:
    """Return the record that closed the ticket, from the archive or the broker's log.

    Raises:
        UserError: if neither has it.
    """
    if not seq:
        raise UserError(f"ticket {options.group} of run {place.name} has no record yet")
    frame = archive.find_frame(place.folder / archive.FOLDER, seq)
    if frame is not None:
        return frame.record()
    async with connect_run(options, place.name, place.folder) as (bus, why):
        kept = await peek(bus, SAMPLES, seq) if bus else None
    if kept is None:
        where = f"neither in the archive (samples.keep) nor in the broker's log{f': {why}' if why else ''}"
        raise UserError(f"record {seq} of ticket {options.group} is {where}")
    return kept.record


def _figures(folder: Path, found: dict[str, Any]) -> dict[int, TokenFigures]:
    """Return what was recorded of the tokens of a ticket's trajectories, by their places in its
    group.
    """
    try:
        return dict(
            enumerate(read_figures(folder / archive.FOLDER, found.get("step", 0), found["ticket"]))
        )
    except UserError:
        return {}  # never recorded, or damaged: nothing else needs them


def _chosen(group: wire.Group, episode: int | None) -> list[tuple[int, wire.Trajectory]]:
    """Return the trajectories of one episode, or all, with their places; an episode of several
    samples has several.
    """
    there = sorted({trajectory.episode for trajectory in group.trajectories})
    if episode is not None and episode not in there:
        raise ConfigError("--episode", episode, f"one of {', '.join(map(str, there))}")
    return [
        (place, one)
        for place, one in enumerate(group.trajectories)
        if episode in (None, one.episode)
    ]


def trajectory_of(
    trajectory: wire.Trajectory, tokenizer: Tokenizer | None, figures: TokenFigures | None = None
) -> dict[str, Any]:
    """Return one trajectory as observed and sampled pieces; the latter are also cut where the
    policy version changes.

    Tokens have ``entropy`` and ``ratio`` where they were recorded. A turn's reward is on its last
    token; the reward of reward hubs is on the last token of the last turn.
    """
    ids = trajectory.token_ids.array()
    logprobs = trajectory.logprobs.array()
    rewards = np.zeros(len(ids))
    for turn in trajectory.turns:
        rewards[turn.end - 1] += turn.reward if turn.end > turn.start else 0.0
    if trajectory.turns and trajectory.response:
        rewards[trajectory.turns[-1].end - 1] += trajectory.reward - trajectory.reward_parts.get(
            "env", 0.0
        )
    numbers = {turn.start: number for number, turn in enumerate(trajectory.turns, start=1)}
    measured = figures.by_position(trajectory) if figures is not None else {}
    pieces: list[dict[str, Any]] = []
    position = 0
    for span in [*spans(trajectory), {"start": len(ids), "end": len(ids)}]:
        start = span["start"]
        end = span["end"]
        if position < start:
            pieces.append(
                {"start": position, "end": start, "text": decode(ids[position:start], tokenizer)}
            )
        if start < end:
            number = numbers.get(start, pieces[-1].get("turn", 0) if pieces else 0)
            version = span["policy_version"]
            tokens = [
                {"position": at, "id": int(ids[at]), "text": decode(ids[at : at + 1], tokenizer)}
                | {
                    "logprob": float(logprobs[at]),
                    "policy_version": version,
                    "reward": float(rewards[at]),
                }
                | (
                    dict(zip(("entropy", "ratio"), measured[at], strict=True))
                    if at in measured
                    else {}
                )
                for at in range(start, end)
            ]
            total = float(logprobs[start:end].sum(dtype=np.float64))
            piece = {
                "text": decode(ids[start:end], tokenizer),
                "turn": number,
                "logprob": total,
                "tokens": tokens,
            }
            pieces.append({**span, **piece})
        position = end
    names = ("episode", "reward", "reward_parts", "success", "end", "greedy")
    return {name: getattr(trajectory, name) for name in names} | {"pieces": pieces}


def text_of(found: dict[str, Any], tokens: bool) -> Iterator[str]:
    """Yield the lines of the text output, given that of ``--json``; with ``tokens`` one more for
    each sampled token.
    """
    step = f", trained in step {found['step']}" if found.get("step") else ""
    asked = f"; {found['domain']}, task {found['task_index']}" if "domain" in found else ""
    yield f"ticket {found['ticket']}: {found['state']}{step}{asked}"
    if found["tokenizer"].startswith("none, "):
        yield f"tokenizer: {found['tokenizer']}"
    for trajectory in found["trajectories"]:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory["reward_parts"].items())
        solved = "solved" if trajectory["success"] else "not solved"
        greedy = ", greedy" if trajectory["greedy"] else ""
        yield ""
        reward = f"reward {trajectory['reward']:g} ({parts})"
        end = trajectory["end"]
        yield f"episode {trajectory['episode']}: {reward}, {solved}, {end}{greedy}"
        for piece in trajectory["pieces"]:
            yield from _piece(piece, tokens)


def _piece(piece: dict[str, Any], tokens: bool) -> Iterator[str]:
    where = f"tokens {piece['start']}-{piece['end'] - 1}"
    if "turn" not in piece:
        yield f"  seen, {where}"
    else:
        mean = piece["logprob"] / (piece["end"] - piece["start"])
        score = f"reward {piece['reward']:g}, logprob {piece['logprob']:.4f} (mean {mean:.4f})"
        valid = "" if piece["valid"] else ", no valid action"
        who = f"{piece['server']}, version {piece['policy_version']}"
        yield f"  turn {piece['turn']}, {where}: {who}, {score}, {piece['finish_reason']}{valid}"
    yield from (f"    | {line}" for line in piece["text"].split("\n"))
    for token in piece.get("tokens", []) if tokens else []:
        reward = f"  reward {token['reward']:g}" if token["reward"] else ""
        shown = json.dumps(token["text"], ensure_ascii=False)
        numbers = f"logprob {token['logprob']:9.4f}  version {token['policy_version']}{reward}"
        if "entropy" in token:
            numbers += f"  entropy {token['entropy']:.4f}  ratio {token['ratio']:.4f}"
        yield f"    {token['position']:6} {token['id']:8}  {shown:16} {numbers}"
