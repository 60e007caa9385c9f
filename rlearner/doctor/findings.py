"""Formats the doctor's findings, and derives the exit code. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from broker.settings.preflight import PreflightFinding, Status

_MARKS: Final[dict[Status, str]] = {
    "ok": "ok",
    "warning": "WARNING",
    "missing": "MISSING",
    "absent": "-",
}
RUNS = 0
LACKS = 1


def exit_code(findings: Sequence[PreflightFinding]) -> int:
    """Return 1 if something needed is missing, else 0."""
    if any(finding.status == "missing" for finding in findings):
        return LACKS
    return RUNS


def format_table(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return the findings as text, each with its fix on the next line, and the verdict."""
    lines: list[str] = []
    width = max((len(finding.name) for finding in findings), default=0)
    for area in dict.fromkeys(finding.area for finding in findings):
        lines.append(area)
        for finding in (row for row in findings if row.area == area):
            lines.append(
                f"  {_MARKS[finding.status]:<8} {finding.name:<{width}}  {finding.found}".rstrip()
            )
            if finding.remedy:
                lines.append(f"  {'':<8} {'':<{width}}  -> {finding.remedy}")
    return "\n".join([*lines, "", format_verdict(findings, subject)])


def format_verdict(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return the last line."""
    missing = [finding.name for finding in findings if finding.status == "missing"]
    warnings = sum(finding.status == "warning" for finding in findings)
    text = f"{subject} can run"
    if missing:
        text = f"{subject} lacks {len(missing)}: {', '.join(missing)}"
    if warnings:
        text += f"; {warnings} warning{'s' * (warnings > 1)}"
    return text


def as_json(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return one JSON object: ``can_run``, ``missing``, ``findings``."""
    missing = [finding.name for finding in findings if finding.status == "missing"]
    report = {
        "subject": subject,
        "can_run": not missing,
        "missing": missing,
        "findings": list(map(asdict, findings)),
    }
    return json.dumps(report, indent=1)
