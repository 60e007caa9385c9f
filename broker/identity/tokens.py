"""Join tokens: files that let one more host, or another user, join a run as one role."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from broker.contract.permissions import JOINING, OBSERVER
from broker.contract.streams import check_token
from broker.errors import ConfigError, UserError
from broker.identity import cluster_login, vouchers
from broker.identity.key_folder import BrokerUser, KeyFolder
from broker.identity.keys import Key
from broker.identity.login import Login
from broker.system.private_files import is_open_to_others

INVITED: Final = (*JOINING, OBSERVER)
SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_BYTES: Final = 16_384


@dataclass(frozen=True)
class JoinToken:
    """What a process needs to join a run.

    Attributes:
        broker: address of the broker.
        run: the run.
        role: the only role that it admits.
        name: by which the operator can revoke it.
        expires_at: seconds since the epoch, 0: never; the broker may have renewed it since.
        owner: public key of the owner of the run.
        certificate: by which the owner vouches for its key.
        authority: certificate of the broker's authority as PEM text; empty for one on loopback.
        seed: the secret half of its key.
    """

    broker: str
    run: str
    role: str
    name: str
    expires_at: float
    owner: str
    certificate: str
    authority: str
    seed: str = field(repr=False)

    @property
    def login(self) -> Login:
        """The login of this token's key, or one that the environment names, with signatures by this
        key.

        Raises:
            UserError: if the environment names a login that cannot be used.
        """
        key = Key(self.seed)
        environment_login = cluster_login.from_environment(self.broker)
        login = Login(
            self.role,
            self.run,
            self.name,
            key=key,
            owner=self.owner,
            authority=self.authority,
            certificate=self.certificate,
            signer=key,
        )
        if environment_login is None or not environment_login.shows_something:
            return login
        authority = self.authority if environment_login.tls_context() is None else ""
        return replace(
            login,
            name="",
            key=environment_login.key,
            authority=authority,
            cluster=environment_login,
        )


def parse_duration(text: str) -> float:
    """Return the seconds in a text such as ``30m``, ``24h`` or ``7d``.

    Raises:
        ValueError: if it is none.
    """
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r} is not allowed; a number with s, m, h or d, for example 24h")
    return float(int(match[1]) * SECONDS[match[2]])


def make_join_token(
    keys: KeyFolder, broker: str, role: str, run: str, *, name: str = "", expires_s: float
) -> JoinToken:
    """Make a token and let the broker accept its key.

    Args:
        name: unique among the broker's tokens; empty: the role with a random number.
        expires_s: seconds until the broker refuses it.

    Raises:
        UserError: if the name is taken, or the role does not join runs.
    """
    if role not in INVITED:
        raise ConfigError("role", role, f"one of {', '.join(INVITED)}")
    name = check_token(name or f"{role}-{secrets.token_hex(3)}", "--name")
    if any(user.name == name for user in keys.users()):
        raise UserError(
            f"--name {name}: the broker already has a token of this name; `rlearner revoke "
            f"{name}` ends it"
        )
    key = Key.generate()
    owner = keys.owner(check_token(run, "--run"))
    expires_at = time.time() + expires_s
    certificate = vouchers.certify_key(owner, run, role, key.public, expires_at)
    authority = keys.authority() if keys.makes_keys else cluster_login.named_authority()
    join_token = JoinToken(
        broker,
        run,
        role,
        name=name,
        expires_at=expires_at,
        owner=owner.public,
        certificate=certificate,
        authority=authority,
        seed=key.seed,
    )
    keys.admit(BrokerUser(key.public, role, run, name, join_token.expires_at))
    return join_token


def write_token(join_token: JoinToken, path: Path) -> None:
    """Write a token to a new file that only its owner can read.

    Raises:
        UserError: if the file exists or cannot be written.
    """
    write_private(json.dumps(asdict(join_token)) + "\n", path)


def write_private(text: str, path: Path) -> None:
    """Write the file that --out names, a new one that only its owner can read.

    Raises:
        UserError: if the file exists or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


def read_token(place: str, role: str) -> JoinToken:
    """Return the token in a file, or on standard input for ``-``.

    Args:
        role: of the process that joins.

    Raises:
        UserError: if it cannot be read, other users can read it, or it is not a valid token for
            this role.
    """
    join_token = _parse_token(_read_bytes(place), place)
    if join_token.role != role:
        raise UserError(
            f"--join {place}: this token is for {join_token.role} {join_token.name}, not for {role}"
        )
    return join_token


def _read_bytes(place: str) -> bytes:
    if place == "-":
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    try:
        with open(place, "rb") as file:
            if is_open_to_others(os.fstat(file.fileno())):
                raise UserError(
                    f"--join {place}: other users can read this file; run chmod 600 {place}"
                )
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"--join {place}: {error.strerror}") from None


def _parse_token(data: bytes, place: str) -> JoinToken:
    problem = f"--join {place}: this is not a token that `rlearner invite` wrote"
    try:
        if len(data) > MOST_BYTES:
            raise UserError(problem)
        fields: Any = msgspec.json.decode(data)
        join_token = msgspec.convert(fields, JoinToken, strict=True)
    except (msgspec.MsgspecError, RecursionError):
        raise UserError(problem) from None
    Key.parse(join_token.seed, f"--join {place}")
    return join_token
