"""``broker permissions``: the accounts and users of a run for a nats-server of your own, with what
each may do.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from broker.contract.permissions import OBSERVER, OPERATOR
from broker.contract.streams import ROLES, check_token
from broker.errors import UserError
from broker.identity.account_jwts import write_accounts
from broker.identity.cluster_login import CREDS
from broker.identity.key_folder import KeyFolder, as_server_user
from broker.identity.login import KEYS
from broker.identity.server_config import (
    LOGINS,
    ServerUser,
    certificate_user,
    format_accounts,
    password_user,
    require_distinct,
)

ABOUT: Final = """\
# {runs}: {roles}. Made by `broker permissions`; make it again after an upgrade of rlearner.
# A server gives a new account its services at the second reload only, so reload it twice (or restart it).
"""
ABOUT_JWTS: Final = """\
# {runs}: {roles}. Made by `broker permissions`; make it again after an upgrade of rlearner.
# Run these commands where nsc has the operator's key; they replace the accounts that exist.
"""
CERTIFICATES: Final = """\
# The tls block of the server needs ca_file and verify_and_map: true. A client certificate has its user's name as CN.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = parser.add_argument
    add(
        "--run", metavar="NAME", action="append", required=True, help="a run; repeat it for several"
    )
    roles = (*ROLES, OBSERVER, OPERATOR)
    text = f"only these roles (all; with --login password or certificate all but {OBSERVER})"
    add("--role", choices=roles, nargs="+", help=text)
    text = "what the users log in with (%(default)s)"
    add("--login", choices=LOGINS, default=LOGINS[0], help=text)
    text = f"folder of the keys, made if missing ({KEYS}); the output has only their public halves"
    add("--keys", metavar="FOLDER", default=os.environ.get(KEYS), help=text)


def show_permissions(options: argparse.Namespace) -> None:
    """Print the configuration; make the keys that it names.

    Raises:
        UserError: if the folder of keys is not named, or cannot be used.
    """
    runs = [check_token(run, "--run") for run in dict.fromkeys(options.run)]
    every = (*ROLES, OBSERVER, OPERATOR)
    usual = every if options.login in ("nkey", "jwt") else (*ROLES, OPERATOR)
    roles = [role for role in every if role in (options.role or usual)]
    if options.login == "jwt":
        _show_accounts(options, runs, roles)
        return
    users = list(_users(options, runs, roles))
    require_distinct(users)
    print(ABOUT.format(runs=", ".join(runs), roles=", ".join(roles)), end="")
    if options.login == "certificate":
        print(CERTIFICATES, end="")
    print(format_accounts(users), end="")
    if options.login == "nkey":
        text = f"seeds are in {options.keys}: set {KEYS} to it on this host; elsewhere use `rlearner invite`"
        print(text, file=sys.stderr)


def _show_accounts(options: argparse.Namespace, runs: Sequence[str], roles: Sequence[str]) -> None:
    """Write the accounts as JWTs; print the commands with which nsc takes them over."""
    if not options.keys:
        raise UserError(
            f"--login jwt needs --keys FOLDER (or {KEYS}), where the accounts will be written"
        )
    keys = KeyFolder(Path(options.keys).absolute())
    for run in runs:
        keys.owner(run)
    try:
        files = write_accounts(keys, _identities(runs, roles))
    except OSError as error:
        raise UserError(f"cannot write to {options.keys}: {error.strerror or error}") from None
    print(ABOUT_JWTS.format(runs=", ".join(runs), roles=", ".join(roles)), end="")
    for file in files:
        print(f"nsc import account --file {shlex.quote(str(file))} --overwrite --skip")
    print("nsc push --all")
    text = f"credentials of each role are in {options.keys}: {CREDS}={options.keys}/RUN/ROLE.creds"
    print(text, file=sys.stderr)


def _identities(runs: Sequence[str], roles: Sequence[str]) -> list[tuple[str, str]]:
    identities = [(role, run) for run in runs for role in roles if role != OPERATOR]
    return identities + [(OPERATOR, "")] * (OPERATOR in roles)


def _users(
    options: argparse.Namespace, runs: Sequence[str], roles: Sequence[str]
) -> Iterator[ServerUser]:
    keys = KeyFolder(Path(options.keys).absolute()) if options.keys else None
    if keys is not None:
        for run in runs:
            keys.owner(run)
    identities = _identities(runs, roles)
    if options.login != "nkey":
        make = password_user if options.login == "password" else certificate_user
        yield from (make(role, run) for role, run in identities)
        return
    if keys is None:
        raise UserError(
            f"--login nkey needs --keys FOLDER (or {KEYS}), where the keys of the users are or will be"
        )
    for role, run in identities:
        _ = keys.operator() if role == OPERATOR else keys.role(role, run)
    yield from (
        as_server_user(user) for user in keys.users() if (user.role, user.run) in identities
    )
