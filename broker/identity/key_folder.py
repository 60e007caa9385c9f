"""The folder of a broker's keys: one per role and run, and who else may connect.

    operator.key             seed of the operator, who may do everything
    RUN/ROLE.key             seed of a role of a run, for processes of this user
    RUN/owner.key            seed that signs what a run follows; unknown to the broker
    users/PUBLIC_KEY.json    role, run and expiry of every key that the broker accepts
    tls/                     ca.pem of the broker's authority; certificate and key of each address
    authorization.conf       the same as the nats-server reads it, written whenever a user changes
    servers/PID.MACHINE      the servers to reload then, of several hosts if they share the folder;
                             as old as the authorization.conf that they have read

Only its owner can enter the folder.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from broker.contract.permissions import OPERATOR, permissions
from broker.contract.streams import check_token
from broker.errors import UserError
from broker.identity.keys import Key
from broker.identity.reloads import reload_server
from broker.identity.server_config import ServerUser, account_names, format_accounts, nkey_user
from broker.system.locks import lock
from broker.system.private_files import private_write
from broker.system.process_identity import has_ended, identity_of, is_elsewhere, this_machine

AUTHORIZATION: Final = "authorization.conf"
# others hold it while servers read their configuration again, for each new key
LOCK_WITHIN_S: Final = 60.0


@dataclass(frozen=True)
class BrokerUser:
    """One key that the broker accepts.

    Attributes:
        public_key: as nkeys text.
        role: a role, or the operator.
        run: the run; empty for the operator.
        name: by which it can be revoked; empty for keys of processes of this user.
        expires_at: seconds since the epoch, 0: never.
    """

    public_key: str
    role: str
    run: str = ""
    name: str = ""
    expires_at: float = 0.0

    def expired(self, now: float) -> bool:
        """Return whether it is no longer accepted."""
        return 0 < self.expires_at <= now


class KeyFolder:
    """A broker's keys. Several processes may use the folder at once.

    Args:
        makes_keys: whether it is of a private broker, which learns of changes by itself; else its
            user tells the servers, and a missing key is an error.

    Raises:
        UserError: if the folder belongs to another user, others can enter it, or it makes no keys
            and is missing.
    """

    def __init__(self, path: Path, *, makes_keys: bool = True) -> None:
        self.path = path
        self.makes_keys = makes_keys
        if not makes_keys and not path.is_dir():
            raise UserError(
                f"there is no folder of keys {path}; make it with `broker permissions --keys "
                f"{path}`"
            )
        # when the users were last read, and when the next one expires
        self._read = 0
        self._next_expiry = 0.0
        try:
            for folder in (path, path / "users", path / "servers"):
                folder.mkdir(mode=0o700, parents=folder == path, exist_ok=True)
            status = path.stat()
        except OSError as error:
            raise UserError(f"cannot use the folder of keys {path}: {error.strerror}") from None
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UserError(
                f"the folder of keys {path} must belong to you alone; run chmod 700 {path}"
            )

    def operator(self) -> Key:
        """Return the operator's key, a new one in a new folder."""
        return self._key(self.path / "operator.key", OPERATOR, "")

    def role(self, role: str, run: str) -> Key:
        """Return the key of this user's processes of a role and run; make it at the first call."""
        return self._key(self.path / check_token(run, "run") / f"{role}.key", role, run)

    def owner(self, run: str) -> Key:
        """Return the key of the owner of a run, a new one at the first call."""
        return self._key(self.path / check_token(run, "run") / "owner.key", "", run)

    def _key(self, file: Path, role: str, run: str) -> Key:
        """Return the key in a file; a new one if there is none, which the broker accepts if it is
        one of a role.
        """
        if file.is_file():
            return Key.load(file)
        if not self.makes_keys:
            names = f"--run {run}" if run else "any --run"
            raise UserError(
                f"{file} is missing; make it with `broker permissions {names} --keys {self.path}`"
            )
        with self._locked():
            if not file.is_file():
                key = Key.generate()
                file.parent.mkdir(mode=0o700, exist_ok=True)
                if role:
                    self._admit(BrokerUser(key.public, role, run))
                    self._reload()
                # Last: a process that was killed before has left no key that no server knows.
                _write_private(file, f"{key.seed}\n")
        return Key.load(file)

    def authority(self) -> str:
        """Return the certificate of the broker's authority as PEM text, empty if no other host
        reaches the broker.
        """
        try:
            return (self.path / "tls" / "ca.pem").read_text(encoding="ascii")
        except FileNotFoundError:
            return ""

    def certificate(self, address: str) -> tuple[Path, Path]:
        """Return the files of certificate and key of the broker's server at an IP address.

        Raises:
            UserError: if one cannot be used.
        """
        # takes a third of a second to import
        from broker.identity.certificates import server_certificate

        folder = self.path / "tls"
        with self._locked():
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                return server_certificate(folder, address)
            except (OSError, ValueError) as error:
                raise UserError(f"cannot use the certificates in {folder}: {error}") from None

    def admit(self, user: BrokerUser) -> None:
        """Accept one more key.

        Raises:
            ConfigError: if its role does not exist, or its key cannot name a file.
        """
        with self._locked():
            self._admit(user)
            self._reload()

    def _admit(self, user: BrokerUser) -> None:
        permissions(user.role, user.run, user.name)  # checks the role
        name = check_token(user.public_key, "public key")
        _write_private(self.path / "users" / f"{name}.json", json.dumps(asdict(user)) + "\n")

    def revoke(self, user: BrokerUser) -> None:
        """Refuse a key from now on; the broker closes its connections."""
        with self._locked():
            # What a file says is accepted, whatever its name.
            for file, accepted in self._user_files():
                if accepted.public_key == user.public_key:
                    file.unlink(missing_ok=True)
            self._reload()

    def renew(self, name: str, expires_at: float) -> BrokerUser | None:
        """Accept a token's key until another time, also if it has expired; return it, None without
        such a token.
        """
        with self._locked():
            for user in self._every_user():
                if user.name == name:
                    renewed = replace(user, expires_at=expires_at)
                    self._admit(renewed)
                    self._reload()
                    return renewed
        return None

    def users(self) -> list[BrokerUser]:
        """Return every key that has not expired, ordered by role, run and name."""
        now = time.time()
        alive = [user for user in self._every_user() if not user.expired(now)]
        return sorted(alive, key=lambda user: (user.run, user.role, user.name, user.public_key))

    def _every_user(self) -> list[BrokerUser]:
        return [user for _, user in self._user_files()]

    def _user_files(self) -> list[tuple[Path, BrokerUser]]:
        files = list[tuple[Path, BrokerUser]]()
        for file in (self.path / "users").glob("*.json"):
            with suppress(FileNotFoundError):  # revoked in between
                user = BrokerUser(**json.loads(file.read_text(encoding="utf-8")))
                files.append((file, user))
        return files

    def serve(self, pid: int, server_log: Path, read: int) -> None:
        """Reload this nats-server whenever a user changes; its log says when it has.

        Args:
            read: the version of ``authorization.conf`` before the server was started.
        """
        note = self._note_of(pid)
        _write_private(note, f"{identity_of(pid)}\n{server_log}\n")
        os.utime(note, ns=(read, read))

    def version(self) -> int:
        """Return the version of ``authorization.conf``, by its time of change."""
        return (self.path / AUTHORIZATION).stat().st_mtime_ns

    def _note_of(self, pid: int) -> Path:
        return self.path / "servers" / f"{pid}.{zlib.crc32(this_machine().encode()):08x}"

    def follow(self, pid: int) -> None:
        """Reload this nats-server if it has not read the newest users: the process that changed
        them was on another host, was killed, or did not know this server yet.
        """
        note = self._note_of(pid)
        with suppress(FileNotFoundError, ProcessLookupError):
            if note.stat().st_mtime_ns != self.version():
                self._tell(note, has_new_accounts=True)

    def refresh(self) -> None:
        """Write what the nats-server reads, and reload the servers if that changed, as after an
        expiry.
        """
        with self._locked():
            self._reload()

    def expire(self) -> None:
        """Refuse the keys that have expired since the last call; cheap while no user changes."""
        changed = (self.path / "users").stat().st_mtime_ns
        if changed == self._read and time.time() < self._next_expiry:
            return
        self._read = changed
        self._next_expiry = min(
            (user.expires_at for user in self.users() if user.expires_at), default=math.inf
        )
        self.refresh()

    def _reload(self) -> None:
        text = format_accounts(map(as_server_user, self.users()))
        file = self.path / AUTHORIZATION
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            return
        known_accounts = (
            account_names(file.read_text(encoding="utf-8")) if file.is_file() else set()
        )
        _write_private(file, text)
        for note in (self.path / "servers").glob("[0-9]*"):  # not the drafts
            identity = note.read_text(encoding="utf-8").partition("\n")[0]
            if has_ended(identity):
                note.unlink(missing_ok=True)
            elif not is_elsewhere(identity):
                with suppress(ProcessLookupError, PermissionError):
                    self._tell(note, has_new_accounts=not account_names(text) <= known_accounts)

    def _tell(self, note: Path, *, has_new_accounts: bool) -> None:
        """Reload the nats-server of this machine that a note names."""
        server_log = Path(note.read_text(encoding="utf-8").partition("\n")[2].strip())
        version = self.version()
        reload_server(
            int(note.name.partition(".")[0]), server_log, has_new_accounts=has_new_accounts
        )
        os.utime(note, ns=(version, version))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        problem = f"another process has locked the folder of keys {self.path}"
        with lock(self.path / "lock", problem, wait_s=LOCK_WITHIN_S):
            yield


def as_server_user(user: BrokerUser) -> ServerUser:
    """Return a user as the nats-server's configuration has it."""
    return nkey_user(user.public_key, user.role, user.run, user.name)


def _write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, whole or not at all."""
    private_write(file, text.encode())
