"""Writes who may connect to a nats-server, and what each may do, in the language of its
configuration file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from broker.contract.permissions import API, OPERATOR, permissions
from broker.errors import UserError
from broker.identity.accounts import (
    ACCOUNT,
    MAPPED_API,
    Export,
    Import,
    account_of,
    accounts_of,
    map_subject,
)

# of each identity of a joining role: a fleet's processes share the key of their user or host, and
# each connection may hold 64 MiB that its client does not read
CONNECTIONS: Final = 1024
REPLY_WITHIN_S: Final = 600  # then the server forgets where the reply to a request goes
LOGINS: Final = ("nkey", "password", "certificate", "jwt")


@dataclass(frozen=True)
class ServerUser:
    """One identity as the nats-server knows it.

    Attributes:
        shows: what it logs in with, as entries of the configuration: ``nkey: "U..."``.
        role: a role, or the operator.
        run: the run; empty for the operator.
        name: of a join token.
    """

    shows: str
    role: str
    run: str
    name: str = ""


def nkey_user(public_key: str, role: str, run: str, name: str = "") -> ServerUser:
    """Return a user that signs a nonce with its key."""
    return ServerUser(f"nkey: {json.dumps(public_key)}", role, run, name)


def password_user(role: str, run: str) -> ServerUser:
    """Return a user with a password that the nats-server reads from its environment."""
    variable = re.sub("[^A-Z0-9]+", "_", f"RLEARNER_{run}_{role}_PASSWORD".upper())
    return ServerUser(f"user: {json.dumps(user_name(role, run))}, password: ${variable}", role, run)


def certificate_user(role: str, run: str) -> ServerUser:
    """Return a user whose client certificate has its name as common name."""
    return ServerUser(f"user: {json.dumps(f'CN={user_name(role, run)}')}", role, run)


def user_name(role: str, run: str) -> str:
    """Return the user name of a role of a run, such as ``quick.envhub``."""
    return role if role == OPERATOR else f"{run}.{role}"


def require_distinct(users: Sequence[ServerUser]) -> None:
    """Check that no two users log in with the same, as with the variables of runs ``a-b`` and
    ``a_b``.

    Raises:
        UserError: if two do.
    """
    users_by_secret = dict[str, ServerUser]()
    for user in users:
        secret = user.shows.rpartition(": ")[2]
        if (first_user := users_by_secret.setdefault(secret, user)) is not user:
            raise UserError(
                f"runs {first_user.run} and {user.run} would share {secret}; rename one, or use "
                "--login nkey"
            )


def format_accounts(users: Iterable[ServerUser]) -> str:
    """Return the block of accounts of these users, which no other account of the server reaches."""
    members: dict[str, list[ServerUser]] = {}
    for user in users:
        members.setdefault(account_of(user.role, user.run), []).append(user)
    lines = ["accounts {"]
    for account in accounts_of(
        (user.role, user.run) for group in members.values() for user in group
    ):
        lines.append(f"  {json.dumps(account.name)} {{")
        if account.name == ACCOUNT:
            lines.append("    jetstream: enabled")
        else:
            lines.append(f'    mappings = {{ "{API}.>": "{MAPPED_API}.>" }}')
            if num_users := len(members.get(account.name, ())):
                lines.append(f"    limits {{ max_connections: {CONNECTIONS * num_users} }}")
        lines += _format_users(members.get(account.name, ()))
        lines += ["    exports = [", *map(_format_export, account.exports), "    ]"]
        lines += ["    imports = [", *map(_format_import, account.imports), "    ]", "  }"]
    return "\n".join([*lines, "}"]) + "\n"


def account_names(configuration: str) -> set[str]:
    """Return the names of the accounts in the block that ``accounts`` wrote."""
    return set(re.findall(r'^  "(\S+)" \{$', configuration, re.MULTILINE))


def _format_users(users: Iterable[ServerUser]) -> list[str]:
    lines = ["    users = ["]
    for user in users:
        allowed = permissions(user.role, user.run, user.name)
        publish = list(allowed.publish)
        if account_of(user.role, user.run) != ACCOUNT:
            publish = list(map(map_subject, publish))
        lines.append(f"      # {user.role} {user.run} {user.name}".rstrip())
        lines.append(f"      {{ {user.shows}, permissions: {{")
        lines.append(f"        publish: {{ allow: {json.dumps(publish)} }}")
        lines.append(f"        subscribe: {{ allow: {json.dumps(list(allowed.subscribe))} }}")
        lines.append("      } }")
    return [*lines, "    ]"]


def _format_export(export: Export) -> str:
    more = ", response: stream" if export.has_many_replies else ""
    more += f', response_threshold: "{REPLY_WITHIN_S}s"' if export.is_request else ""
    return f"      {{ service: {json.dumps(export.subject)}{more} }}"


def _format_import(imported: Import) -> str:
    source = (
        f"{{ account: {json.dumps(imported.exporter)}, subject: {json.dumps(imported.subject)} }}"
    )
    more = ""
    if imported.local_subject != imported.subject:
        more = f", to: {json.dumps(imported.local_subject)}"
    return f"      {{ service: {source}{more} }}"
