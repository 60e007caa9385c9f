"""JWTs of the accounts of runs and of their users, for nats-servers with an operator (nsc).

    accounts/NAME.nk         seed of an account in the folder of keys
    accounts/NAME.ROLE.nk    seed of the account's signing key for a role, which has its permissions
    accounts/NAME.jwt        the account, signed by itself; nsc signs it with the operator's key
    RUN/ROLE.creds           credentials of a role, for RL_BROKER_CREDS

The permissions are those of a signing key because in the JWT of a user they would be longer than a
server's ``max_control_line``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nkeys

from broker.contract.permissions import API, OPERATOR, permissions
from broker.identity.accounts import (
    ACCOUNT,
    MAPPED_API,
    Account,
    Export,
    Import,
    account_of,
    accounts_of,
    map_subject,
)
from broker.identity.key_folder import KeyFolder
from broker.identity.keys import Key
from broker.identity.server_config import CONNECTIONS, REPLY_WITHIN_S, user_name
from broker.system.private_files import private_folder, private_write

UNLIMITED: Final = dict.fromkeys(
    ("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1
) | {"wildcards": True}
STORAGE: Final = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)


@dataclass(frozen=True)
class Issuer:
    """A key of an operator or an account that signs JWTs.

    Attributes:
        seed: the secret half, as nkeys text; never shown.
    """

    seed: str = field(repr=False)

    @classmethod
    def generate(cls, prefix: int = nkeys.PREFIX_BYTE_ACCOUNT) -> Issuer:
        """Return a new key, of an account unless the prefix is another one."""
        return cls(bytes(nkeys.encode_seed(os.urandom(32), prefix)).decode())

    @classmethod
    def load(cls, file: Path) -> Issuer:
        """Return the key of an account in a file; a new one if there is none."""
        if not file.is_file():
            private_write(file, f"{cls.generate().seed}\n".encode())
        return cls(file.read_text(encoding="ascii").strip())

    @property
    def public(self) -> str:
        """The public key."""
        return bytes(nkeys.from_seed(bytearray(self.seed.encode())).public_key).decode()

    def issue(
        self, subject: str, name: str, claims: Mapping[str, Any], *, expires_at: float = 0
    ) -> str:
        """Return a signed JWT.

        Args:
            subject: public key of the account or user that it is of.
            name: that people see.
            expires_at: seconds since the epoch, 0: never.
        """
        body = {"iss": self.public, "sub": subject, "iat": int(time.time()), "name": name}
        body |= {"exp": int(expires_at)} if expires_at else {}
        body |= {"nats": {**claims, "version": 2}}
        digest = hashlib.sha256(json.dumps(body).encode()).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        signed = ".".join(_encode(json.dumps(part).encode()) for part in (header, body))
        signature = nkeys.from_seed(bytearray(self.seed.encode())).sign(signed.encode())
        return f"{signed}.{_encode(bytes(signature))}"


def account_claims(
    account: Account, public_keys: Mapping[str, str], scopes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return what the JWT of an account says.

    Args:
        public_keys: of each account, by name.
        scopes: of its signing keys, see ``role_scope``.
    """
    claims: dict[str, Any] = {"type": "account", "signing_keys": list(scopes)}
    if account.name == ACCOUNT:
        claims["limits"] = UNLIMITED | STORAGE
    else:
        claims["limits"] = UNLIMITED | {"conn": CONNECTIONS}
        claims["mappings"] = {f"{API}.>": [{"subject": f"{MAPPED_API}.>", "weight": 100}]}
    claims["exports"] = list(map(_export_claims, account.exports))
    claims["imports"] = [
        _import_claims(imported, public_keys[imported.exporter]) for imported in account.imports
    ]
    return claims


def _export_claims(export: Export) -> dict[str, Any]:
    return {
        "name": export.subject,
        "subject": export.subject,
        "type": "service",
        "response_type": "Stream" if export.has_many_replies else "Singleton",
    } | ({"response_threshold": REPLY_WITHIN_S * 10**9} if export.is_request else {})


def _import_claims(imported: Import, exporter_key: str) -> dict[str, Any]:
    claims = {
        "name": imported.subject,
        "subject": imported.subject,
        "account": exporter_key,
        "type": "service",
    }
    if imported.local_subject != imported.subject:
        claims["local_subject"] = imported.local_subject
    return claims


def role_scope(role: str, run: str, public_key: str) -> dict[str, Any]:
    """Return the scope of a signing key: users that it signs have the permissions of the role."""
    allowed = permissions(role, run)
    publish = list(allowed.publish)
    if account_of(role, run) != ACCOUNT:
        publish = list(map(map_subject, publish))
    template: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}
    template |= {"pub": {"allow": publish}, "sub": {"allow": list(allowed.subscribe)}}
    return {
        "kind": "user_scope",
        "key": public_key,
        "role": user_name(role, run),
        "template": template,
    }


def format_credentials(jwt: str, seed: str) -> str:
    """Return the content of a credentials file, as nsc writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        "************************* IMPORTANT *************************\n"
        "NKEY Seed printed below can be used to sign and prove identity.\n"
        "NKEYs are sensitive and should be treated as secrets.\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n\n"
        "*************************************************************\n"
    )


def write_accounts(keys: KeyFolder, identities: Iterable[tuple[str, str]]) -> list[Path]:
    """Write the accounts of these roles and runs, and credentials; return the accounts' files.

    The keys of accounts that exist already stay, so that nsc takes the new files for the same
    accounts.

    Raises:
        OSError: if a file cannot be written.
    """
    identities = list(identities)
    folder = keys.path / "accounts"
    private_folder(folder)
    accounts = accounts_of(identities)
    issuers = {account.name: Issuer.load(folder / f"{account.name}.nk") for account in accounts}
    public_keys = {name: issuer.public for name, issuer in issuers.items()}
    scopes: dict[str, list[dict[str, Any]]] = {name: [] for name in issuers}
    for role, run in identities:
        name = account_of(role, run)
        signing = Issuer.load(folder / f"{name}.{user_name(role, run)}.nk")
        scopes[name].append(role_scope(role, run, signing.public))
        _write_credentials(keys, role, run, signing, public_keys[name])
    files = list[Path]()
    for account in accounts:
        claims = account_claims(account, public_keys, scopes[account.name])
        jwt = issuers[account.name].issue(public_keys[account.name], account.name, claims)
        files.append(folder / f"{account.name}.jwt")
        private_write(files[-1], f"{jwt}\n".encode())
    return files


def _write_credentials(
    keys: KeyFolder, role: str, run: str, signing: Issuer, account_key: str
) -> None:
    """Write the credentials of a role, whose key is the one in the folder."""
    if role == OPERATOR:
        key: Key = keys.operator()
        file = keys.path / f"{OPERATOR}.creds"
    else:
        key = keys.role(role, run)
        file = keys.path / run / f"{role}.creds"
    claims = {"type": "user", "issuer_account": account_key}
    jwt = signing.issue(key.public, user_name(role, run), claims)
    private_write(file, format_credentials(jwt, key.seed).encode())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
