"""What was looked at before anything starts, one line a thing; pure. The doctor shows all of it, ``rlearner up``
refuses to start by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "missing", "absent"]


@dataclass(frozen=True, slots=True)
class PreflightFinding:
    """One thing that was looked at.

    Attributes:
        area: what it belongs to, ``engines`` for example; findings of one area stand together.
        name: of the thing.
        status: ``missing``: the configuration cannot run without it. ``warning``: it can, and something will go wrong
        sooner
            or later. ``absent``: optional, and nothing here asks for it.
        found: what is there, in a few words.
        remedy: the command, or the setting, that changes it; empty where nothing need be done.
    """

    area: str
    name: str
    status: Status
    found: str
    remedy: str = ""
