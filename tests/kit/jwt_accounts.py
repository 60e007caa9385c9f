"""Operator, account and user JWTs as nsc makes them, for a nats-server with a memory resolver."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import nkeys

from broker.contract.permissions import OPERATOR
from broker.contract.streams import ROLES
from broker.identity.account_jwts import (
    UNLIMITED,
    Issuer,
    account_claims,
    format_credentials,
    role_scope,
)
from broker.identity.accounts import account_of, accounts_of
from broker.identity.keys import Key


def operator_lines(accounts: dict[str, dict[str, Any]]) -> str:
    """Return the lines of a server with an operator who signs these claims, by the public key of
    their account.
    """
    operator = Issuer.generate(nkeys.PREFIX_BYTE_OPERATOR)
    system = Issuer.generate().public
    accounts = accounts | {system: {"type": "account", "limits": UNLIMITED}}
    lines = [
        f"operator: {operator.issue(operator.public, 'test', {'type': 'operator'})}",
        f"system_account: {system}",
        "resolver: MEMORY",
        "resolver_preload: {",
        *(f"  {key}: {operator.issue(key, 'test', claims)}" for key, claims in accounts.items()),
        "}",
    ]
    return "\n".join(lines)


def imported_account(jwt: str) -> tuple[str, dict[str, Any]]:
    """Return the public key and the claims of an account that signed itself, as `nsc import` reads
    it before it signs with the operator's key.
    """
    body = jwt.strip().split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    assert claims["iss"] == claims["sub"]
    return claims["sub"], claims["nats"]


class JwtAccounts:
    """An operator with the accounts of one run, and the credentials files of its users."""

    def __init__(self, run: str) -> None:
        self._run = run
        roles = (*ROLES, OPERATOR)
        self._accounts = {
            account.name: account for account in accounts_of((role, run) for role in roles)
        }
        self._keys = {name: Issuer.generate() for name in self._accounts}
        self._signing = {role: Issuer.generate() for role in roles}

    def configuration(self) -> str:
        """Return the lines for the server."""
        public_keys = {name: key.public for name, key in self._keys.items()}
        scopes = {
            name: [
                role_scope(role, self._run, key.public)
                for role, key in self._signing.items()
                if account_of(role, self._run) == name
            ]
            for name in self._accounts
        }
        return operator_lines(
            {
                public_keys[name]: account_claims(account, public_keys, scopes[name])
                for name, account in self._accounts.items()
            }
        )

    def credentials(
        self, file: Path, role: str, *, expires_at: float = 0, own_permissions: bool = False
    ) -> Path:
        """Write the credentials of a user with the permissions of a role.

        Args:
            own_permissions: whether its JWT has the permissions, which makes it long.
        """
        user, claims = Key.generate(), {"type": "user"}
        if own_permissions:
            claims |= role_scope(role, self._run, "")["template"]
        account = self._keys[account_of(role, self._run)]
        issuer = account if own_permissions else self._signing[role]
        claims |= {} if own_permissions else {"issuer_account": account.public}
        jwt = issuer.issue(user.public, "test", claims, expires_at=expires_at)
        file.write_text(format_credentials(jwt, user.seed))
        file.chmod(0o600)
        return file
