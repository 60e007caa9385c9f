"""The secret that the nodes of a learner share: a file that only its owner can read."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from broker.errors import UserError
from broker.system.private_files import private_folder

log = logging.getLogger(__name__)

NUM_BYTES: Final = 32
# A shared home may show a file of another node late.
APPEARS_S: Final = 30.0


def default_path() -> Path:
    """Return ``$XDG_CONFIG_HOME/rlearner/nodes.key``, by default in ``~/.config``."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "rlearner" / "nodes.key"


@dataclass(frozen=True)
class NodeKey:
    """The shared secret, and the CURVE keys of both ends that follow from it."""

    secret: bytes

    def __repr__(self) -> str:
        # Logs must not have the secret.
        return "NodeKey()"

    def curve_secret(self, end: str) -> bytes:
        """Return the secret CURVE key (Z85) of an end, ``rank-0`` or ``others``."""
        from zmq.utils import z85

        digest = blake2b(end.encode(), key=self.secret, digest_size=32, person=b"rlearner-nodes")
        return bytes(z85.encode(digest.digest()))

    def curve_public(self, end: str) -> str:
        """Return the public key (Z85) of an end."""
        import zmq

        return bytes(zmq.curve_public(self.curve_secret(end))).decode()


def read_key(
    path: Path, *, make: bool, wait_s: float = APPEARS_S, nap: Callable[[float], None] = time.sleep
) -> NodeKey:
    """Return the key in a file.

    Args:
        make: make the file if it is missing, as node 0 does; else wait for it up to ``wait_s``.

    Raises:
        UserError: if there is none, others can read it, or it holds no key.
    """
    deadline = time.monotonic() + wait_s
    is_announced = False
    while True:
        try:
            return _read_file(path)
        except FileNotFoundError:
            if make:
                _make_file(path)
            elif time.monotonic() < deadline:
                if not is_announced:
                    is_announced = True
                    log.info("waiting up to %g s for the key of the nodes, %s", wait_s, path)
                nap(0.5)
            else:
                remedy = (
                    "node 0 makes it; copy it from there (chmod 600), or name it with --nodes-key"
                )
                raise UserError(f"no key of the nodes at {path}: {remedy}") from None
        except OSError as error:
            raise UserError(
                f"--nodes-key {path}: {error.strerror}; expected a file with the key of the nodes"
            ) from None


def _read_file(path: Path) -> NodeKey:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(descriptor) as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid():
            raise UserError(
                f"{path} belongs to another user (uid {status.st_uid}); name a file of yours"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise UserError(
                f"{path} can be read by other users; "
                "make a new one, or chmod 600 it if none has read it"
            )
        text = file.read(4 * NUM_BYTES).strip()
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b""
    if len(secret) != NUM_BYTES:
        raise UserError(
            f"{path}: expected {2 * NUM_BYTES} hexadecimal digits, the key of the nodes"
        )
    return NodeKey(secret)


def _make_file(path: Path) -> None:
    """Make the file unless another process has made it; a reader never sees a part of it.

    Raises:
        UserError: if it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        private_folder(path.parent)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_bytes(NUM_BYTES).hex() + "\n")
        # Unlike a rename, a link fails if another process was first.
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
