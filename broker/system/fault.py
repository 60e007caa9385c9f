"""Describes errors of users' code as text: the error, the line of the user's file, and the
traceback for the log.

An exception never leaves its process; its description does.
"""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from pathlib import Path
from typing import Final

from broker.system.logs import TRACEBACK
from broker.system.redaction import redact

MAX_TRACE_CHARS: Final = 8000
MAX_DISTINCT: Final = 100  # tracebacks in one log

_ROOT: Final = Path(__file__).resolve().parents[2]
_PACKAGES: Final = (
    "broker", "envhub", "learner", "rewardhub", "rlearner_text", "rlearner_workers", "rollout",
)  # fmt: skip
_OURS: Final = tuple(f"{_ROOT / name}{os.sep}" for name in _PACKAGES)
# packages of ours that run where a user's could
_SUPPLIED: Final = tuple(f"{_ROOT / name}{os.sep}" for name in ("envhub/envs", "rewardhub/rewards"))
_CALLERS: Final = (
    str(_ROOT / "rewardhub/rewards/loading.py"),
    str(_ROOT / "rewardhub/rewards/base.py"),
)
# What users type in an interpreter.
_TYPED: Final = ("<stdin>", "<ipython-input")
_INSTALLED: Final = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_LIBRARIES: Final = (
    *(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")),
    *_INSTALLED,
)


def told(error: BaseException) -> str:
    """Return ``KeyError: 'no such column' (bad_rewards.py:7 in raises)``, one line."""
    name = type(error).__name__
    words = said(error)
    position = place(error)
    return redact(f"{name}{f': {words}' if words else ''}{f' ({position})' if position else ''}")


def place(error: BaseException) -> str:
    """Return ``bad_rewards.py:7 in raises``, the innermost frame of the user's code, or empty.

    The error is often raised by a library that the user's code called. User code begins at the
    first frame that is neither ours nor Python's own; an installed package may be user code.
    """
    stack = traceback.walk_tb(error.__traceback__)
    frames = [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
    users = (
        index
        for index, (file, _, _) in enumerate(frames)
        if not _is_ours(file) and not _is_pythons(file)
    )
    first = next(users, None)
    if first is None:
        return ""
    entry = frames[first][0]
    inside = [
        frame
        for frame in frames[first:]
        if frame[0] == entry or not (_is_ours(frame[0]) or frame[0].startswith(("<", *_LIBRARIES)))
    ]
    file, line, name = inside[-1]
    return clean(f"{os.path.basename(file)}:{line} in {name}")


def trace(error: BaseException) -> str:
    """Return the traceback, cut in the middle if very long; empty if it has no format."""
    try:
        text = redact(
            "".join(traceback.format_exception(error)).rstrip().encode("utf-8", "replace").decode()
        )
    except Exception:  # noqa: BLE001 - it formats the user's objects, and memory may be exhausted
        return ""
    half = MAX_TRACE_CHARS // 2
    if len(text) <= MAX_TRACE_CHARS:
        return text
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def said(error: BaseException) -> str:
    """Return the text of a user's exception in one line that can be sent."""
    try:
        return clean(str(error))
    except Exception as second:  # noqa: BLE001 - its __str__ fails
        return f"(and cannot say what, {type(second).__name__})"


def clean(text: str, limit: int = 500) -> str:
    """Return one line of at most ``limit`` characters of valid Unicode."""
    return " ".join(text[: 4 * limit].split())[:limit].encode("utf-8", "replace").decode()


class TracebackLog:
    """Logs each traceback once; the place that raises identifies it."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def say(self, log: logging.Logger, message: str, text: str) -> None:
        """Log a warning with a traceback of ``trace``, unless that is empty or logged already."""
        extra = {TRACEBACK: text} if text and self._is_new(text) else {}
        log.warning("%s", message, extra=extra)

    def _is_new(self, text: str) -> bool:
        lines = [line for line in text.splitlines() if line.startswith('  File "')]
        key = lines[-1] if lines else text
        if key in self._seen or len(self._seen) >= MAX_DISTINCT:
            return False
        self._seen.add(key)
        return True


def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and (not file.startswith(_SUPPLIED) or file in _CALLERS)


def _is_pythons(file: str) -> bool:
    if file.startswith(_TYPED):
        return False
    return file.startswith("<") or (file.startswith(_LIBRARIES) and not file.startswith(_INSTALLED))
