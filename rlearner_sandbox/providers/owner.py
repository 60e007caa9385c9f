"""Folders that belong to a living process, and the removal of what dead ones have left.

Each process that provides sandboxes has a folder with a file that it keeps locked. The kernel ends
the lock with the process, however that ends, so a process that gets the lock may clean up.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from broker.system.private_files import replace
from rlearner_sandbox.providers.trees import remove_tree

log = logging.getLogger(__name__)

# A folder that has been without its name for so long was abandoned before it was locked.
UNNAMED_S: Final = 60.0


def default_folder() -> Path:
    """Return where this user's layers and sandboxes are: in XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "rlearner" / "sandboxes"


class OwnedFolder:
    """A new folder below ``state/live``, locked until ``release`` or the end of this process."""

    def __init__(self, state: Path) -> None:
        self.id = secrets.token_hex(8)
        live = state / "live"
        live.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = live / self.id
        # Others look at it only once it is locked.
        draft = live / f".{self.id}"
        draft.mkdir(mode=0o700)
        self._lock = os.open(draft / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        replace(draft, self.path)

    def note_process(self, pid: int) -> None:
        """Record a process that has to end with this one."""
        (self.path / f"process-{pid}").write_text(str(start_ticks(pid)), encoding="ascii")

    def release(self) -> None:
        """Remove the folder and end the lock; a second call does nothing."""
        if self._lock >= 0:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = -1


def start_ticks(pid: int) -> int:
    """Return when a process began, which tells it from a later one of the same number; 0: none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def remove_leftovers(state: Path, remove_more: Callable[[str], None] | None = None) -> list[str]:
    """Remove what processes that have ended left below ``state/live``; return their ids.

    Args:
        remove_more: removes what the owner of this id has elsewhere.
    """
    removed = []
    for path in _dead_owners(state / "live"):
        _end_processes(path)
        if remove_more is not None:
            remove_more(path.name)
        remove_tree(path)
        removed.append(path.name)
        log.warning("removed the sandboxes of a process that has ended: %s", path.name)
    return removed


def _dead_owners(live: Path) -> Iterator[Path]:
    for path in sorted(live.iterdir()) if live.is_dir() else ():
        try:
            if path.name.startswith(".") and time.time() - path.stat().st_mtime < UNNAMED_S:
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (FileNotFoundError, NotADirectoryError):
            # Another process removed it.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _end_processes(folder: Path) -> None:
    for note in folder.glob("process-*"):
        pid = int(note.name.partition("-")[2])
        ticks = int(note.read_text(encoding="ascii") or 0)
        if ticks and start_ticks(pid) == ticks:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
