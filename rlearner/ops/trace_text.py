"""Formats a trace as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(trace: Mapping[str, Any]) -> list[str]:
    """Return the lines of one trace, given the output of ``rlearner trace --json``."""
    head = f"ticket {trace['ticket']}: {trace['state']}"
    if "reason" in trace:
        head += f", {trace['reason']}"
    lines = [head]
    if "domain" in trace:
        task = f"{trace['domain']}, task {trace['task_index']}"
        lines.append(f"  asked for   {task}, no token older than version {trace['min_version']}")
    if "hub" in trace:
        lines += _worker_lines(trace)
    if "closed_by" in trace:
        lines.append(f"  closed by   {trace['closed_by']}: {trace['detail']}")
    elif "detail" in trace:
        lines.append(f"  held        {trace['detail']}")
    record = trace["record"]
    lines.append(f"  record      {record['seq'] or 'none'}, {record['source']}")
    if record["stored_at"]:
        lines[-1] += f", stored at {record['stored_at']}"
    if "oldest_version" in trace:
        lines.append(f"  versions    {trace['oldest_version']} to {trace['newest_version']}")
    if "step" in trace:
        lines.append(f"  trained in  step {trace['step']}")
        if trace["step_time"]:
            lines[-1] += f" at {trace['step_time']}"
    if trace["duplicates"]:
        lines.append(f"  duplicates  records {', '.join(str(seq) for seq in trace['duplicates'])}")
    for trajectory in trace.get("trajectories", []):
        lines += _episode_lines(trajectory)
    return lines


def _worker_lines(trace: Mapping[str, Any]) -> list[str]:
    seconds = trace["seconds"]
    times = f"generate {seconds['generate']:.3f} s, environment {seconds['env_step']:.3f} s"
    scorers = ", ".join(trace["reward_hubs"]) or "its environment alone"
    return [
        f"  ran at      {trace['hub']}, delivery {trace['deliveries']}; {times}",
        f"  scored by   {scorers}; {seconds['reward']:.3f} s",
    ]


def _episode_lines(trajectory: Mapping[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory["reward_parts"].items())
    size = f"{trajectory['tokens']} tokens"
    reward = f"reward {trajectory['reward']:g} ({parts})"
    episode = f"episode {trajectory['episode']}"
    if seat := trajectory.get("seat"):
        episode += f", seat {seat}"
    lines = [f"  {episode}: {size}, {reward}, {trajectory['end']}"]
    if (teacher := trajectory.get("teacher")) is not None:
        source = f"teacher {teacher['policy']}, version {teacher['version']}"
        lines.append(f"    {source}: {teacher['kl']:g} nats per token away")
    for span in trajectory["spans"]:
        tokens = f"tokens {span['start']}-{span['end'] - 1}"
        source = f"{span['server']}, version {span['policy_version']}"
        line = f"    {tokens:20}{source}, reward {span['reward']:g}, {span['finish_reason']}"
        lines.append(line if span["valid"] else f"{line}, no valid action")
    return lines
