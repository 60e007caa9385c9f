"""``rlearner api-key create``, ``list`` and ``revoke``: keys of this user's HTTP API."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from broker.errors import UserError
from broker.identity.tokens import write_private
from broker.system.visible_text import visible_json
from rlearner_text.openai.named_keys import KeyStore, NamedKey


async def create_key(options: argparse.Namespace) -> int:
    """Write a new key to a file; print where, and its limits.

    Raises:
        UserError: if the name is taken, or a file cannot be written; then there is no new key.
    """
    store = KeyStore()
    secret, key = store.create(
        options.name,
        expires_s=options.expires,
        requests_per_minute=options.requests_per_minute,
        tokens_per_minute=options.tokens_per_minute,
        concurrent=options.concurrent,
    )
    try:
        write_private(f"{secret}\n", Path(options.out))
    except UserError:
        # Nobody has the secret, so the key must not stay valid.
        store.revoke(key.name)
        raise
    if options.json:
        print(visible_json({"file": options.out, **_to_json(key)}))
    else:
        description = _describe_key(key)
        print(f"{options.out}: API key {description}; send it as Authorization: Bearer KEY")
    return 0


async def list_keys(options: argparse.Namespace) -> int:
    """Print all keys."""
    keys = KeyStore().read()
    if options.json:
        print(visible_json({"keys": [_to_json(key) for key in keys]}))
        return 0
    for key in keys:
        print(_describe_key(key))
    print(f"{len(keys)} API key{'s' * (len(keys) != 1)}", file=sys.stderr)
    return 0


async def revoke_key(options: argparse.Namespace) -> int:
    """Refuse a key from now on.

    Raises:
        UserError: if there is no key of that name.
    """
    KeyStore().revoke(options.name)
    if options.json:
        print(visible_json({"name": options.name, "revoked": True}))
    else:
        print(f"{options.name}: servers refuse it from now on")
    return 0


def _to_json(key: NamedKey) -> dict[str, Any]:
    """Return what may be shown of a key: everything but its hash."""
    return {name: value for name, value in asdict(key).items() if name != "sha256"} | {
        "expired": key.expired(time.time())
    }


def _describe_key(key: NamedKey) -> str:
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.expires_at))
    parts = [f"{'expired' if key.expired(time.time()) else 'until'} {until}"]
    parts += [f"{key.requests_per_minute} requests per minute"] * (key.requests_per_minute > 0)
    parts += [f"{key.tokens_per_minute} tokens per minute"] * (key.tokens_per_minute > 0)
    parts += [f"{key.concurrent} requests at once"] * (key.concurrent > 0)
    return f"{key.name}, {', '.join(parts)}"
