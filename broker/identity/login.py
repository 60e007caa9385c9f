"""Finds the key with which a process connects to a broker.

A private broker notes its folder of keys by its address, in a folder of its user. Processes of the
same user find it there; all others need a join token. The environment names logins and folders of
keys for a user's own cluster.
"""

from __future__ import annotations

import os
import ssl
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from broker.contract.permissions import INBOX, OPERATOR, inbox_prefix
from broker.contract.sizes import Buffer
from broker.errors import UserError
from broker.identity import cluster_login, signatures, vouchers
from broker.identity.cluster_login import ClusterLogin
from broker.identity.key_folder import KeyFolder
from broker.identity.keys import Key
from broker.system.private_files import private_folder, private_write

DEFAULT_PORT: Final = 4222
KEYS: Final = "RL_BROKER_KEYS"  # environment variable: folder of keys of a user's own cluster


@dataclass(frozen=True)
class Login:
    """What a process shows to a broker, and what it may therefore do.

    Attributes:
        role: the role or operator whose permissions it has; empty without any login.
        run: the run of that role; empty for the operator.
        name: of the join token; empty for a key of this user's broker.
        key: None without any login, or for one by password or certificate.
        owner: public key of the run's owner, from a join token.
        certificate: by which the owner vouches for the key of a join token, see ``vouchers``.
        authority: certificate of the broker's authority as PEM text; empty: the system's
            authorities count.
        keys: the broker's folder of keys, if this user has it.
        cluster: the rest of a login that the environment names.
        signer: key of the join token, with which it vouches for what it says.
    """

    role: str = ""
    run: str = ""
    name: str = ""
    key: Key | None = field(default=None, repr=False)
    owner: str = ""
    authority: str = ""
    keys: KeyFolder | None = field(default=None, repr=False)
    cluster: ClusterLogin | None = field(default=None, repr=False)
    certificate: str = ""
    signer: Key | None = field(default=None, repr=False)

    @property
    def inbox(self) -> str:
        """The subject prefix of replies to this identity."""
        return inbox_prefix(self.role, self.run, self.name) if self.role else INBOX

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context that accepts only a broker with a certificate of its authority; None:
        the default one.

        Raises:
            UserError: if the certificate of the authority is none.
        """
        if not self.authority:
            return self.cluster.tls_context() if self.cluster is not None else None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_verify_locations(cadata=self.authority)
        except (ssl.SSLError, ValueError):
            raise UserError(
                "the certificate of the broker's authority is damaged; ask for a new join token"
            ) from None
        return context

    @property
    def manages(self) -> bool:
        """Whether it may create and trim streams; assumed where no login is needed."""
        return self.role in ("", OPERATOR, "learner")

    def sign(self, run: str, subject: str, data: Buffer, *, above: int = 0) -> dict[str, str]:
        """Return the header that signs a value; none on brokers without keys.

        Args:
            above: see ``signatures.signed``.
        """
        if self.keys is None or not self.manages:
            return {}
        return signatures.sign_value(self.keys.owner(run), subject, data, above=above)

    def stamp(self, run: str, subject: str, headers: dict[str, str] | None, data: Buffer) -> int:
        """Return when the owner of a run signed a value, in milliseconds; 0 on brokers without
        keys.

        Raises:
            WireError: if the owner did not sign it.
        """
        owner = self._owner(run)
        return signatures.verify_stamp(owner, subject, headers, data) if owner else 0

    def vouch(self, run: str, statement: bytes) -> str:
        """Return the voucher of this identity for a statement; empty on brokers without keys."""
        if self.keys is not None:
            return vouchers.make_voucher(self.keys.owner(run), statement)
        return (
            vouchers.make_voucher(self.signer, statement, self.certificate) if self.signer else ""
        )

    def check_voucher(self, run: str, role: str, statement: bytes, voucher: str) -> None:
        """Check that a process of a role made a statement; on brokers without keys nothing is
        checked.

        Raises:
            WireError: if the voucher does not prove it.
        """
        if owner := self._owner(run):
            vouchers.check_voucher(owner, run, role, statement, voucher)

    def _owner(self, run: str) -> str:
        return self.keys.owner(run).public if self.keys is not None else self.owner

    @property
    def manages_all(self) -> bool:
        """Whether it may see all runs."""
        return self.role in ("", OPERATOR)


def find_login(url: str, role: str, run: str) -> Login:
    """Return the login for a broker: the key of this role and run if its folder of keys is this
    user's.

    Without such a folder, the environment may name a login.

    Args:
        role: a role, or the operator; a process that does not know its run yet connects as the
            operator.

    Raises:
        UserError: if a folder or a file cannot be used.
    """
    role, run = (OPERATOR, "") if not run else (role, "" if role == OPERATOR else run)
    if (keys := _noted_keys(url)) is not None:
        key = keys.role(role, run) if run else keys.operator()
        return Login(role, run, key=key, authority=keys.authority(), keys=keys)
    environment_login = cluster_login.from_environment(url)
    keys = _named_keys()
    if environment_login is not None and environment_login.shows_something:
        return Login(role, run, key=environment_login.key, keys=keys, cluster=environment_login)
    if keys is not None:
        key = keys.role(role, run) if run else keys.operator()
        tls = environment_login or ClusterLogin()
        return Login(role, run, key=key, keys=keys, cluster=replace(tls, named_by=KEYS, key=key))
    return Login(cluster=environment_login)


def keys_of(url: str) -> KeyFolder:
    """Return the folder of keys of a broker of this user, or that of a user's own cluster.

    Raises:
        UserError: if there is none.
    """
    if (keys := _noted_keys(url) or _named_keys()) is not None:
        return keys
    remedy = (
        f"on the machine where it was started, as the same user; for your own cluster, set {KEYS}"
    )
    raise UserError(
        f"no keys of a broker at {url.rpartition('@')[2]} on this machine; run this {remedy}"
    )


def _noted_keys(url: str) -> KeyFolder | None:
    for server in url.split(","):
        if (folder := _noted_folder(server)) is not None and folder.is_dir():
            return KeyFolder(folder)
    return None


def _named_keys() -> KeyFolder | None:
    """Return the folder that the environment names, which `broker permissions` made."""
    path = os.environ.get(KEYS)
    return KeyFolder(Path(path), makes_keys=False) if path else None


def client_options(url: str) -> dict[str, Any]:
    """Return the arguments with which a plain ``nats.connect`` logs in as the operator; empty
    without a login.
    """
    login = find_login(url, OPERATOR, "")
    cluster = login.cluster or ClusterLogin()
    options: dict[str, Any] = {"inbox_prefix": login.inbox} if login.role else {}
    if login.key is not None and cluster.jwt:
        options |= {"user_jwt_cb": cluster.jwt.encode, "signature_cb": login.key.sign_nonce}
    elif login.key is not None:
        options["nkeys_seed_str"] = login.key.seed
    if cluster.password:
        options |= {"user": cluster.user, "password": cluster.password}
    return options | ({"tls": context} if (context := login.tls_context()) is not None else {})


def note_keys(url: str, folder: Path) -> None:
    """Note the folder of keys of a broker of this user.

    Raises:
        UserError: if the note cannot be written.
    """
    notes = _notes_folder()
    file = notes / _note_name(url)
    try:
        private_folder(notes)
        private_write(file, f"{folder.absolute()}\n".encode())
    except OSError as error:
        raise UserError(
            f"cannot write to {notes}: {error.strerror}; set XDG_STATE_HOME to a folder of yours"
        ) from None


def forget_keys(url: str, folder: Path) -> None:
    """Remove the note of a broker that has ended, unless another one took its address."""
    if _noted_folder(url) == folder.absolute():
        with suppress(FileNotFoundError):
            (_notes_folder() / _note_name(url)).unlink()


def _noted_folder(url: str) -> Path | None:
    """Return the folder of keys that is noted for one address, if any.

    Raises:
        UserError: if another user could have written the note.
    """
    try:
        with (_notes_folder() / _note_name(url)).open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                raise UserError(f"{file.name} belongs to another user; remove it")
            return Path(file.read().strip())
    except (OSError, ValueError):
        return None


def state_folder() -> Path:
    """Return the folder of this user for what outlives a login session, as brokers do."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "rlearner"


def _notes_folder() -> Path:
    return state_folder() / "brokers"


def _note_name(url: str) -> str:
    """Return a file name for one address; loopback has several names."""
    parts = urlsplit(url.strip() if "://" in url else f"nats://{url.strip()}")
    host = parts.hostname or ""
    host = "127.0.0.1" if host in ("localhost", "::1") or host.startswith("127.") else host
    return f"{host}_{parts.port or DEFAULT_PORT}".replace("/", "_")
