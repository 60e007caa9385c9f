"""Writes who may connect to a nats-server, and what each may do, in the language of its configuration file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from broker.contract.permissions import OPERATOR, permissions
from broker.errors import UserError

ACCOUNT: Final = "RLEARNER"
FORMATS: Final = ("accounts", "users")
LOGINS: Final = ("nkey", "password", "certificate")


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
    """Check that no two users log in with the same, as with the variables of runs ``a-b`` and ``a_b``.

    Raises:
        UserError: if two do.
    """
    seen = dict[str, ServerUser]()
    for user in users:
        shown = user.shows.rpartition(": ")[2]
        if (other := seen.setdefault(shown, user)) is not user:
            raise UserError(f"runs {other.run} and {user.run} would share {shown}; rename one, or use --login nkey")


def authorization(users: Iterable[ServerUser]) -> str:
    """Return the block that accepts these users in the default account and refuses all others."""
    return "\n".join(["authorization {", *_listed(users), "}"]) + "\n"


def account(users: Iterable[ServerUser]) -> str:
    """Return an account of these users, separate from every other account of the server."""
    inner = ["  jetstream: enabled", *_listed(users)]
    return "\n".join(["accounts {", f"  {ACCOUNT} {{", *(f"  {line}" for line in inner), "  }", "}"]) + "\n"


def _listed(users: Iterable[ServerUser]) -> list[str]:
    lines = ["  users = ["]
    for user in users:
        allowed = permissions(user.role, user.run, user.name)
        lines.append(f"    # {user.role} {user.run} {user.name}".rstrip())
        lines.append(f"    {{ {user.shows}, permissions: {{")
        lines.append(f"      publish: {{ allow: {json.dumps(list(allowed.publish))} }}")
        lines.append(f"      subscribe: {{ allow: {json.dumps(list(allowed.subscribe))} }}")
        lines += ["      allow_responses: { max: 1, expires: 600s }"] * allowed.replies
        lines.append("    } }")
    return [*lines, "  ]"]
