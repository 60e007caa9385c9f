"""Findings of checks before a start; ``rlearner doctor`` prints, ``rlearner up`` enforces them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "missing", "absent"]


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """The result of one check.

    Attributes:
        area: group of the check, for example ``engines``; findings of one area are shown together.
        name: what was checked.
        status: ``missing``: the configuration cannot run without it. ``warning``: it can, but will
            fail sooner or later. ``absent``: optional and not used by the configuration.
        found: the result in a few words.
        remedy: the command or setting that changes it; empty if nothing needs to be done.
    """

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""
