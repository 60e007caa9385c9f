"""The owners whose runs may load code on this host, as far as the code is not part of an installed
package.
"""

from __future__ import annotations

import os
from pathlib import Path

from broker.errors import UserError
from broker.identity.login import state_folder

FILE = "trusted_owners"


def trust_owner(owner: str) -> None:
    """Trust the owner of a public key from now on.

    Raises:
        UserError: if that cannot be noted.
    """
    if is_trusted(owner):
        return
    file = _owners_file()
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(
            os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600), "w"
        ) as opened:
            opened.write(f"{owner}\n")
    except OSError as error:
        raise UserError(
            f"cannot write {file}: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        ) from None


def is_trusted(owner: str) -> bool:
    """Return whether the owner of a public key is trusted.

    Raises:
        UserError: if another user could have written the list.
    """
    try:
        with _owners_file().open(encoding="ascii", errors="replace") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise UserError(f"{file.name} could be written by other users; remove it")
            return owner in file.read().split()
    except OSError:
        return False


def _owners_file() -> Path:
    return state_folder() / FILE
