"""Formats a trace as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of one trace, given the output of ``rlearner trace --json``."""
    lines = [
        f"ticket {found['ticket']}: {found['state']}"
        + (f", {found['reason']}" if "reason" in found else "")
    ]
    if "domain" in found:
        task = f"{found['domain']}, task {found['task_index']}"
        lines.append(f"  asked for   {task}, no token older than version {found['min_version']}")
    if "hub" in found:
        lines += _who(found)
    if "closed_by" in found:
        lines.append(f"  closed by   {found['closed_by']}: {found['detail']}")
    elif "detail" in found:
        lines.append(f"  held        {found['detail']}")
    record = found["record"]
    at = f", stored at {record['stored_at']}" if record["stored_at"] else ""
    lines.append(f"  record      {record['seq'] or 'none'}, {record['source']}{at}")
    if "oldest_version" in found:
        lines.append(f"  versions    {found['oldest_version']} to {found['newest_version']}")
    if "step" in found:
        at = f" at {found['step_time']}" if found["step_time"] else ""
        lines.append(f"  trained in  step {found['step']}{at}")
    if found["duplicates"]:
        lines.append(f"  duplicates  records {', '.join(str(seq) for seq in found['duplicates'])}")
    for trajectory in found.get("trajectories", []):
        lines += _episode(trajectory)
    return lines


def _who(found: Mapping[str, Any]) -> list[str]:
    seconds = found["seconds"]
    took = f"generate {seconds['generate']:.3f} s, environment {seconds['env_step']:.3f} s"
    scored = ", ".join(found["reward_hubs"]) or "its environment alone"
    return [
        f"  ran at      {found['hub']}, delivery {found['deliveries']}; {took}",
        f"  scored by   {scored}; {seconds['reward']:.3f} s",
    ]


def _episode(trajectory: Mapping[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {value:g}" for name, value in trajectory["reward_parts"].items())
    size = f"{trajectory['tokens']} tokens"
    reward = f"reward {trajectory['reward']:g} ({parts})"
    lines = [f"  episode {trajectory['episode']}: {size}, {reward}, {trajectory['end']}"]
    for span in trajectory["spans"]:
        where = f"tokens {span['start']}-{span['end'] - 1}"
        valid = "" if span["valid"] else ", no valid action"
        who = f"{span['server']}, version {span['policy_version']}"
        lines.append(
            f"    {where:20}{who}, reward {span['reward']:g}, {span['finish_reason']}{valid}"
        )
    return lines
