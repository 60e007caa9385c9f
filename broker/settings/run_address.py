"""Finds the broker of a run by the run's folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from broker.errors import UserError
from broker.nats.addresses import DEFAULT_BROKER, without_logins
from broker.system.locks import lock

ADDRESS: Final = "broker.url"
# held by `rlearner up`; a line with its process id, then one with the address of its private broker
UP_LOCK: Final = ".lock"


def find_folder(run: str, root: str = "runs") -> Path | None:
    """Return the folder of the run of that name below ``root``, or the one that ``run`` names."""
    paths = (Path(root) / run, Path(run))
    return next((path for path in paths if (path / "config.yaml").is_file()), None)


def broker_address(url: str | None, folder: Path | None) -> str:
    """Return the broker of the command line, else that of the folder, else RL_BROKER's.

    The folder precedes the variable, which a shell keeps while its user looks at other runs. Only a
    variable that adds a login to the folder's address replaces it.

    Args:
        url: of ``--broker``, if the user has named one.
        folder: of the run, None if it is not known.
    """
    address = ""
    if folder is not None:
        address = current_address(folder)
    variable = os.environ.get("RL_BROKER", "")
    if address and without_logins(variable) == address:
        address = variable
    return url or address or variable or DEFAULT_BROKER


def current_address(folder: Path) -> str:
    """Return the private broker of a running ``rlearner up``, else the noted one."""
    private = private_addresses(folder) if is_held(folder) else []
    return private[-1] if private else noted_address(folder)


def is_held(folder: Path, name: str = UP_LOCK) -> bool:
    """Return whether a process holds this lock of the folder, by default an ``rlearner up``."""
    try:
        if (folder / name).exists():
            lock(folder / name, "held").close()
    except UserError:
        return True
    return False


def noted_address(folder: Path) -> str:
    """Return the broker that the run was last trained with, empty if none is noted."""
    note = folder / ADDRESS
    return note.read_text(encoding="utf-8").strip() if note.is_file() else ""


def private_addresses(folder: Path) -> list[str]:
    """Return the folder's private brokers, oldest first; each ended with its ``rlearner up``."""
    file = folder / UP_LOCK
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [line for line in lines if "://" in line]


def address_by(folder: Path, pid: int) -> str:
    """Return the private broker that a process has noted in the folder, empty if none yet."""
    file = folder / UP_LOCK
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    _, separator, notes = f"\n{text}".rpartition(f"\n{pid}\n")
    address = notes.partition("\n")[0] if separator else ""
    return address if "://" in address else ""
