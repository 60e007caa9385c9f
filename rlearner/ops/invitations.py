"""``rlearner invite``, ``invited``, ``renew`` and ``revoke``: who joins a run from another host or
as another user.
"""

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
from broker.system.visible_text import visible_json


async def invite(options: argparse.Namespace) -> int:
    """Write a join token; print where, and how to use it."""
    keys = keys_of(options.broker)
    made = tokens.invite(
        keys,
        without_logins(options.broker),
        options.role,
        options.run_name,
        name=options.name,
        expires_s=options.expires,
    )
    path = Path(options.out)
    try:
        tokens.write(made, path)
    except UserError:
        keys.revoke(next(user for user in keys.users() if user.name == made.name))
        raise
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.expires_at))
    command = {"rollout": "rollout-server", OBSERVER: f"rlearner exporter {made.run}"}.get(
        options.role, options.role
    )
    if options.json:
        found = {"file": str(path), "role": made.role, "run": made.run, "name": made.name}
        print(
            visible_json(
                {**found, "expires_at": made.expires_at, "command": f"{command} --join {path}"}
            )
        )
    else:
        print(
            f"{path}: {made.role} {made.name} of run {made.run}, until {until}; use it: {command} --join {path}"
        )
    _remind(keys)
    return 0


def _remind(keys: KeyFolder) -> None:
    if not keys.makes_keys:
        print(
            "it takes effect when your servers reload the new output of `broker permissions`",
            file=sys.stderr,
        )


async def invited(options: argparse.Namespace) -> int:
    """Print the tokens that the broker accepts."""
    found = [user for user in keys_of(options.broker).users() if user.name]
    if options.json:
        names = ("name", "role", "run", "expires_at")
        print(
            visible_json(
                {"tokens": [{name: getattr(user, name) for name in names} for user in found]}
            )
        )
        return 0
    for user in found:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(user.expires_at))
        print(f"{user.name}  {user.role} of run {user.run}, until {until}")
    print(f"{len(found)} token{'' if len(found) == 1 else 's'}", file=sys.stderr)
    return 0


async def renew(options: argparse.Namespace) -> int:
    """Let the broker accept a token for longer, also one that has expired; its file and its
    processes stay as they are.

    Raises:
        UserError: if the broker has no token of that name.
    """
    keys = keys_of(options.broker)
    renewed = keys.renew(options.name, time.time() + options.expires)
    if renewed is None:
        others = ", ".join(user.name for user in keys.users() if user.name) or "none"
        raise UserError(f"the broker has no token {options.name!r}; there is {others}")
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(renewed.expires_at))
    text = f"{renewed.name}: the broker accepts it until {until}"
    print(
        visible_json({"name": renewed.name, "expires_at": renewed.expires_at})
        if options.json
        else text
    )
    _remind(keys)
    return 0


async def revoke(options: argparse.Namespace) -> int:
    """Refuse a token from now on.

    Raises:
        UserError: if the broker has no token of that name.
    """
    keys = keys_of(options.broker)
    found = [user for user in keys.users() if user.name == options.name]
    if not found:
        others = ", ".join(user.name for user in keys.users() if user.name) or "none"
        raise UserError(f"the broker has no token {options.name!r}; there is {others}")
    for user in found:
        keys.revoke(user)
    text = f"{options.name}: the broker refuses it{' from now on' if keys.makes_keys else ''}"
    print(
        visible_json({"name": options.name, "revoked": True, "at_once": keys.makes_keys})
        if options.json
        else text
    )
    _remind(keys)
    return 0
