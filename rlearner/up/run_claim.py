"""Decides whether ``rlearner up`` may run: once per run, with the broker that has its streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from broker.errors import UserError
from broker.settings.run_address import UP_LOCK, private_addresses
from broker.system.locks import lock
from learner.run_folder import STORE, noted_epoch, previous_broker
from rlearner.ops.live_learners import FORGOTTEN, ask_broker


async def refuse_other_broker(folder: Path, run: str) -> None:
    """Ask the broker that the run last used, unless it is private to this folder.

    Writes nothing.

    Raises:
        UserError: if a learner trains the run there, or only that broker can hold the run's
            streams.
    """
    url = previous_broker(folder, "")
    if not url:
        return
    learners, problem = await ask_broker(url, run)
    if learners:
        learner = f"learner on {learners[0].host}, process {learners[0].pid}"
        raise UserError(
            f"run {run} is live at {url} ({learner}); `rlearner status {folder}` shows it"
        )
    # An earlier version did not note the private addresses, but left the broker's store.
    trained_by_up = not private_addresses(folder) and (folder / STORE / "jetstream").exists()
    if noted_epoch(folder) and not trained_by_up:
        hint = ""
        # A broker that answers may be another one at this address; `start` finds out.
        if problem not in ("", FORGOTTEN):
            hint = "; if it has lost its store, add --rebase, which counts the open tickets as dead"
        raise UserError(
            f"run {run} was last trained with the broker at {url}{problem}: continue with "
            f"`rlearner start {folder} --broker {url}` and start the other processes by hand{hint}"
        )


class RunClaim:
    """Lock on a run's folder, held by this ``rlearner up`` until it is closed or the process exits.

    Raises:
        UserError: if another ``rlearner up`` holds it.
    """

    def __init__(self, folder: Path, run: str) -> None:
        # `rlearner runs` holds it for a moment.
        self._file: IO[bytes] = lock(folder / UP_LOCK, _live_message(folder, run), wait_s=0.5)
        self._write(str(os.getpid()))

    def note(self, url: str) -> None:
        """Write the private broker's address to the lock file."""
        self._write(url)

    def _write(self, line: str) -> None:
        self._file.write(f"{line}\n".encode())
        self._file.flush()

    def __enter__(self) -> RunClaim:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _live_message(folder: Path, run: str) -> str:
    """Return the message for a folder that another ``rlearner up`` holds."""
    file = folder / UP_LOCK
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    pid = next((line for line in reversed(lines) if line.isdecimal()), "unknown")
    state = "is live"
    # The address comes after the process id, once the broker runs.
    if lines and "://" in lines[-1]:
        state += f" at {lines[-1]}"
    return f"run {run} {state} (`rlearner up`, process {pid}); `rlearner status {folder}` shows it"
