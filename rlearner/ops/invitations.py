"""``rlearner invite``, ``invited``, ``renew`` and ``revoke``: tokens to join a run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from broker.contract.permissions import OBSERVER
from broker.errors import UserError
from broker.identity import tokens
from broker.identity.key_folder import KeyFolder
from broker.identity.login import keys_of
from broker.nats.addresses import without_logins
from broker.settings.run_address import broker_address, find_folder
from broker.system.visible_text import visible_json


async def write_token(options: argparse.Namespace) -> int:
    """Write a join token; print where, and how to use it."""
    url = broker_address(options.broker, find_folder(options.run_name))
    keys = keys_of(url)
    token = tokens.make_join_token(
        keys,
        without_logins(url),
        options.role,
        options.run_name,
        name=options.name,
        expires_s=options.expires,
    )
    path = Path(options.out)
    try:
        tokens.write_token(token, path)
    except UserError:
        # Nobody has the token, so it must not stay valid.
        keys.revoke(next(user for user in keys.users() if user.name == token.name))
        raise
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(token.expires_at))
    programs = {"rollout": "rollout-server", OBSERVER: f"rlearner exporter {token.run}"}
    command = f"{programs.get(options.role, options.role)} --join {path}"
    if options.json:
        fields = {
            "file": str(path),
            "role": token.role,
            "run": token.run,
            "name": token.name,
            "expires_at": token.expires_at,
            "command": command,
        }
        print(visible_json(fields))
    else:
        print(
            f"{path}: {token.role} {token.name} of run {token.run}, until {until}; "
            f"use it: {command}"
        )
    _print_reload_hint(keys)
    return 0


def _print_reload_hint(keys: KeyFolder) -> None:
    if not keys.makes_keys:
        print(
            "it takes effect when your servers reload the new output of `broker permissions`",
            file=sys.stderr,
        )


async def list_tokens(options: argparse.Namespace) -> int:
    """Print the tokens that the broker accepts."""
    # The broker's own users have no name.
    users = [user for user in keys_of(options.broker).users() if user.name]
    if options.json:
        names = ("name", "role", "run", "expires_at")
        rows = [{name: getattr(user, name) for name in names} for user in users]
        print(visible_json({"tokens": rows}))
        return 0
    for user in users:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(user.expires_at))
        print(f"{user.name}  {user.role} of run {user.run}, until {until}")
    print(f"{len(users)} token{'s' * (len(users) != 1)}", file=sys.stderr)
    return 0


async def renew_token(options: argparse.Namespace) -> int:
    """Let the broker accept a token for longer, expired or not; its file and processes stay.

    Raises:
        UserError: if the broker has no token of that name.
    """
    keys = keys_of(options.broker)
    renewed = keys.renew(options.name, time.time() + options.expires)
    if renewed is None:
        raise _no_such_token(keys, options.name)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(renewed.expires_at))
    if options.json:
        print(visible_json({"name": renewed.name, "expires_at": renewed.expires_at}))
    else:
        print(f"{renewed.name}: the broker accepts it until {until}")
    _print_reload_hint(keys)
    return 0


async def revoke_token(options: argparse.Namespace) -> int:
    """Refuse a token from now on.

    Raises:
        UserError: if the broker has no token of that name.
    """
    keys = keys_of(options.broker)
    users = [user for user in keys.users() if user.name == options.name]
    if not users:
        raise _no_such_token(keys, options.name)
    for user in users:
        keys.revoke(user)
    if options.json:
        print(visible_json({"name": options.name, "revoked": True, "at_once": keys.makes_keys}))
    elif keys.makes_keys:
        print(f"{options.name}: the broker refuses it from now on")
    else:
        print(f"{options.name}: the broker refuses it")
    _print_reload_hint(keys)
    return 0


def _no_such_token(keys: KeyFolder, name: str) -> UserError:
    names = ", ".join(user.name for user in keys.users() if user.name) or "none"
    return UserError(f"the broker has no token {name!r}; there is {names}")
