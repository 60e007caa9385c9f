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
    return LACKS if any(finding.status == "missing" for finding in findings) else RUNS


def table(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return the findings as text, each with the command that fixes it on the next line, and the
    verdict.
    """
    lines: list[str] = []
    wide = max((len(finding.name) for finding in findings), default=0)
    for area in dict.fromkeys(finding.area for finding in findings):
        lines.append(area)
        for finding in (one for one in findings if one.area == area):
            lines.append(
                f"  {_MARKS[finding.status]:<8} {finding.name:<{wide}}  {finding.found}".rstrip()
            )
            if finding.remedy:
                lines.append(f"  {'':<8} {'':<{wide}}  -> {finding.remedy}")
    return "\n".join([*lines, "", verdict(findings, subject)])


def verdict(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return the last line."""
    missing = [finding.name for finding in findings if finding.status == "missing"]
    warnings = sum(finding.status == "warning" for finding in findings)
    said = (
        f"{subject} lacks {len(missing)}: {', '.join(missing)}" if missing else f"{subject} can run"
    )
    return f"{said}; {warnings} warning{'' if warnings == 1 else 's'}" if warnings else said


def as_json(findings: Sequence[PreflightFinding], subject: str) -> str:
    """Return one JSON object: ``can_run``, ``missing``, ``findings``."""
    missing = [finding.name for finding in findings if finding.status == "missing"]
    found = {
        "subject": subject,
        "can_run": not missing,
        "missing": missing,
        "findings": list(map(asdict, findings)),
    }
    return json.dumps(found, indent=1)
