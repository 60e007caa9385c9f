"""``rlearner show``: prints one group's trajectories, with rewards, logprobs and versions."""

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
from broker.jetstream.stored_message import peek_message
from broker.settings.run_settings import stored_section
from broker.settings.schema.model import ModelSection
from broker.system.visible_text import visible, visible_json
from learner.algorithm.token_figures import TokenFigures
from learner.credit import archive
from learner.credit.archive_trim import missing_reason
from learner.credit.token_files import read_figures
from learner.reporting.transcripts import decode_tokens, load_tokenizer
from learner.run_folder import RunPlace, connect_run, find_run
from rlearner.ops.tracing import describe_record, sampled_spans, ticket_lines, ticket_summary
from rlearner_text.tokenizer import Tokenizer

NO_RECORD: Final = ("duplicate", "unknown")


async def show_run(options: argparse.Namespace) -> int:
    """Print one group and return the exit code."""
    place = find_run(options.run_name, options.dir)
    lines = ticket_lines(place, options.group)
    seqs = [line.seq for line in lines if line.seq and line.state not in NO_RECORD]
    record = await _find_record(options, place, seqs[-1] if seqs else 0)
    group = ticket_summary(lines)
    if not isinstance(record.message, wire.Group):
        description = describe_record(record)
        reason = description.get("reason", "malformed")
        detail = description.get("detail") or "no details"
        raise UserError(f"ticket {options.group} has no group: {reason}, {detail}")
    model = stored_section(place.config, "model", ModelSection)
    tokenizer, group["tokenizer"] = load_tokenizer(model, place.folder)
    figures = _read_token_figures(place.folder, group)
    group["trajectories"] = [
        trajectory_of(trajectory, tokenizer, figures.get(index))
        for index, trajectory in _select_trajectories(record.message, options.episode)
    ]
    if options.json:
        print(visible_json(group))
    else:
        print(visible("\n".join(text_of(group, options.tokens)), newlines=True))
    return 0


async def _find_record(options: argparse.Namespace, place: RunPlace, seq: int) -> LogRecord:
    """Return the record that closed the ticket, from the archive or the broker's log.

    Raises:
        UserError: if neither has it.
    """
    if not seq:
        raise UserError(f"ticket {options.group} of run {place.name} has no record yet")
    frame = archive.find_frame(place.folder / archive.FOLDER, seq)
    if frame is not None:
        return frame.record()
    async with connect_run(options, place.name, place.folder) as (bus, problem):
        message = await peek_message(bus, SAMPLES, seq) if bus else None
    if message is None:
        reason = missing_reason(place.folder / archive.FOLDER, seq)
        text = f"record {seq} of ticket {options.group} is {reason}; nor is it in the broker's log"
        raise UserError(f"{text}: {problem}" if problem else text)
    return message.record


def _read_token_figures(folder: Path, group: dict[str, Any]) -> dict[int, TokenFigures]:
    """Return what was recorded of the tokens of a ticket's trajectories, by their index."""
    try:
        figures = read_figures(folder / archive.FOLDER, group.get("step", 0), group["ticket"])
        return dict(enumerate(figures))
    except UserError:
        return {}  # never recorded, or damaged: nothing else needs them


def _select_trajectories(
    group: wire.Group, episode: int | None
) -> list[tuple[int, wire.Trajectory]]:
    """Return the trajectories of one episode, which may be several, or of all, with their index."""
    episodes = sorted({trajectory.episode for trajectory in group.trajectories})
    if episode is not None and episode not in episodes:
        raise ConfigError("--episode", episode, f"one of {', '.join(map(str, episodes))}")
    return [
        (index, trajectory)
        for index, trajectory in enumerate(group.trajectories)
        if episode in (None, trajectory.episode)
    ]


def trajectory_of(
    trajectory: wire.Trajectory, tokenizer: Tokenizer | None, figures: TokenFigures | None = None
) -> dict[str, Any]:
    """Return one trajectory as observed and sampled pieces, the latter each of one version.

    Tokens have ``entropy`` and ``ratio`` where they were recorded. A turn's reward is on its last
    token; the reward of reward hubs is on the last token of the last turn.
    """
    ids = trajectory.token_ids.array()
    logprobs = trajectory.logprobs.array()
    rewards = np.zeros(len(ids))
    for turn in trajectory.turns:
        if turn.end > turn.start:
            rewards[turn.end - 1] += turn.reward
    if trajectory.turns and trajectory.response:
        env_reward = trajectory.reward_parts.get("env", 0.0)
        rewards[trajectory.turns[-1].end - 1] += trajectory.reward - env_reward
    numbers = {turn.start: number for number, turn in enumerate(trajectory.turns, start=1)}
    measured = {} if figures is None else figures.by_position(trajectory)
    pieces: list[dict[str, Any]] = []
    position = 0
    for span in [*sampled_spans(trajectory), {"start": len(ids), "end": len(ids)}]:
        start = span["start"]
        end = span["end"]
        if position < start:
            pieces.append(
                {
                    "start": position,
                    "end": start,
                    "text": decode_tokens(ids[position:start], tokenizer),
                }
            )
        if start < end:
            number = numbers.get(start, pieces[-1].get("turn", 0) if pieces else 0)
            version = span["policy_version"]
            tokens: list[dict[str, Any]] = []
            for at in range(start, end):
                token = {
                    "position": at,
                    "id": int(ids[at]),
                    "text": decode_tokens(ids[at : at + 1], tokenizer),
                    "logprob": float(logprobs[at]),
                    "policy_version": version,
                    "reward": float(rewards[at]),
                }
                if at in measured:
                    token["entropy"], token["ratio"] = measured[at]
                tokens.append(token)
            piece = {
                "text": decode_tokens(ids[start:end], tokenizer),
                "turn": number,
                "logprob": float(logprobs[start:end].sum(dtype=np.float64)),
                "tokens": tokens,
            }
            pieces.append({**span, **piece})
        position = end
    names = ("episode", "reward", "reward_parts", "success", "end", "greedy")
    return {name: getattr(trajectory, name) for name in names} | {"pieces": pieces}


def text_of(group: dict[str, Any], tokens: bool) -> Iterator[str]:
    """Yield the lines of the text output; with ``tokens`` one more for each sampled token.

    Args:
        found: the output of ``--json``.
    """
    head = f"ticket {group['ticket']}: {group['state']}"
    if group.get("step"):
        head += f", trained in step {group['step']}"
    if "domain" in group:
        head += f"; {group['domain']}, task {group['task_index']}"
    yield head
    if group["tokenizer"].startswith("none, "):
        yield f"tokenizer: {group['tokenizer']}"
    for trajectory in group["trajectories"]:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory["reward_parts"].items())
        outcome = "solved" if trajectory["success"] else "not solved"
        line = f"episode {trajectory['episode']}: reward {trajectory['reward']:g} ({parts})"
        line += f", {outcome}, {trajectory['end']}"
        if trajectory["greedy"]:
            line += ", greedy"
        yield ""
        yield line
        for piece in trajectory["pieces"]:
            yield from _piece_lines(piece)
            if tokens:
                yield from (_token_line(token) for token in piece.get("tokens", []))


def _piece_lines(piece: dict[str, Any]) -> Iterator[str]:
    span = f"tokens {piece['start']}-{piece['end'] - 1}"
    if "turn" not in piece:
        yield f"  seen, {span}"
    else:
        mean = piece["logprob"] / (piece["end"] - piece["start"])
        score = f"reward {piece['reward']:g}, logprob {piece['logprob']:.4f} (mean {mean:.4f})"
        source = f"{piece['server']}, version {piece['policy_version']}"
        line = f"  turn {piece['turn']}, {span}: {source}, {score}, {piece['finish_reason']}"
        yield line if piece["valid"] else f"{line}, no valid action"
    yield from (f"    | {line}" for line in piece["text"].split("\n"))


def _token_line(token: dict[str, Any]) -> str:
    text = json.dumps(token["text"], ensure_ascii=False)
    numbers = f"logprob {token['logprob']:9.4f}  version {token['policy_version']}"
    if token["reward"]:
        numbers += f"  reward {token['reward']:g}"
    if "entropy" in token:
        numbers += f"  entropy {token['entropy']:.4f}  ratio {token['ratio']:.4f}"
    return f"    {token['position']:6} {token['id']:8}  {text:16} {numbers}"
