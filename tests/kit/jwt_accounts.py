"""Operator, account and user JWTs as nsc makes them, for a nats-server with a memory resolver."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import nkeys

from broker.contract.permissions import API, OPERATOR, permissions
from broker.contract.streams import ROLES
from broker.identity.accounts import (
    ACCOUNT,
    MAPPED_API,
    Account,
    account_of,
    accounts_of,
    map_subject,
)

UNLIMITED = {
    name: -1 for name in ("subs", "data", "payload", "imports", "exports", "conn", "leaf")
} | {"wildcards": True}
STORAGE = {name: -1 for name in ("mem_storage", "disk_storage", "streams", "consumer")}


class Issuer:
    """A key of an operator, an account or a user."""

    def __init__(self, prefix: int) -> None:
        self.seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
        self.public = bytes(nkeys.from_seed(bytearray(self.seed)).public_key).decode()

    def issue(self, subject: str, claims: dict[str, Any], *, expires_at: float = 0) -> str:
        """Return a signed JWT."""
        body = {"iss": self.public, "sub": subject, "iat": int(time.time()), "name": "test"}
        body |= {"exp": int(expires_at)} if expires_at else {}
        body |= {"nats": {**claims, "version": 2}}
        body["jti"] = (
            base64.b32encode(hashlib.sha256(json.dumps(body).encode()).digest())
            .decode()
            .rstrip("=")
        )
        words = [
            _encode(json.dumps(one).encode())
            for one in ({"typ": "JWT", "alg": "ed25519-nkey"}, body)
        ]
        signature = nkeys.from_seed(bytearray(self.seed)).sign(".".join(words).encode())
        return ".".join([*words, _encode(bytes(signature))])


class JwtAccounts:
    """An operator with the accounts of one run, and the credentials files of its users.

    The permissions of a role are in a signing key of its account, as `nsc edit signing-key` writes
    them: in the JWT of a user they would be longer than a server's max_control_line.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        roles = (*ROLES, OPERATOR)
        self._accounts = {one.name: one for one in accounts_of((role, run) for role in roles)}
        self._operator, self._system = (
            Issuer(nkeys.PREFIX_BYTE_OPERATOR),
            Issuer(nkeys.PREFIX_BYTE_ACCOUNT),
        )
        self._keys = {name: Issuer(nkeys.PREFIX_BYTE_ACCOUNT) for name in self._accounts}
        self._signing = {role: Issuer(nkeys.PREFIX_BYTE_ACCOUNT) for role in roles}

    def configuration(self) -> str:
        """Return the lines for the server."""
        issue, system = self._operator.issue, {"type": "account", "limits": UNLIMITED}
        lines = [
            f"operator: {issue(self._operator.public, {'type': 'operator'})}",
            f"system_account: {self._system.public}",
            "resolver: MEMORY",
            "resolver_preload: {",
            *(
                f"  {self._keys[name].public}: {self._account(account)}"
                for name, account in self._accounts.items()
            ),
            f"  {self._system.public}: {issue(self._system.public, system)}",
            "}",
        ]
        return "\n".join(lines)

    def _account(self, account: Account) -> str:
        scopes = [
            self._scope(role)
            for role in self._signing
            if account_of(role, self._run) == account.name
        ]
        claims: dict[str, Any] = {"type": "account", "limits": UNLIMITED, "signing_keys": scopes}
        if account.name == ACCOUNT:
            claims["limits"] = UNLIMITED | STORAGE
        else:
            claims["mappings"] = {f"{API}.>": [{"subject": f"{MAPPED_API}.>", "weight": 100}]}
        claims["exports"] = [
            {
                "name": one.subject,
                "subject": one.subject,
                "type": "service",
                "response_type": "Stream" if one.has_many_replies else "Singleton",
            }
            for one in account.exports
        ]
        claims["imports"] = [
            {
                "name": one.subject,
                "subject": one.subject,
                "account": self._keys[one.exporter].public,
                "type": "service",
            }
            | ({"local_subject": one.local_subject} if one.local_subject != one.subject else {})
            for one in account.imports
        ]
        return self._operator.issue(self._keys[account.name].public, claims)

    def _scope(self, role: str) -> dict[str, Any]:
        allowed = permissions(role, self._run)
        publish = (
            map(map_subject, allowed.publish)
            if account_of(role, self._run) != ACCOUNT
            else allowed.publish
        )
        template: dict[str, Any] = {"subs": -1, "data": -1, "payload": -1}
        template |= {"pub": {"allow": list(publish)}, "sub": {"allow": list(allowed.subscribe)}}
        return {
            "kind": "user_scope",
            "key": self._signing[role].public,
            "role": role,
            "template": template,
        }

    def credentials(
        self, file: Path, role: str, *, expires_at: float = 0, own_permissions: bool = False
    ) -> Path:
        """Write the credentials of a user with the permissions of a role.

        Args:
            own_permissions: whether its JWT has the permissions, which makes it long.
        """
        user, claims = Issuer(nkeys.PREFIX_BYTE_USER), {"type": "user"}
        if own_permissions:
            claims |= self._scope(role)["template"]
        account = self._keys[account_of(role, self._run)]
        issuer = account if own_permissions else self._signing[role]
        claims |= {} if own_permissions else {"issuer_account": account.public}
        jwt = issuer.issue(user.public, claims, expires_at=expires_at)
        file.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            "************************* IMPORTANT *************************\n"
            "NKEY Seed printed below can be used to sign and prove identity.\n"
            "NKEYs are sensitive and should be treated as secrets.\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n\n"
            "*************************************************************\n"
        )
        file.chmod(0o600)
        return file


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
