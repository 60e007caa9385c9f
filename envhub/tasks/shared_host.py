"""Shares one provider of sandboxes among the environments of an event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Final
from weakref import WeakKeyDictionary

from envhub.tasks.host import TaskHost
from envhub.tasks.providers import load_provider
from envhub.tasks.settings import TaskArgs


@dataclass
class _SharedHost:
    host: TaskHost
    users: set[object] = field(default_factory=set)


_Hosts = WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _SharedHost]]
_HOSTS: Final[_Hosts] = WeakKeyDictionary()


def acquire_host(user: object, args: TaskArgs) -> TaskHost:
    """Return the host of this event loop for a provider's settings; made by its first user.

    Raises:
        UserError: if there is no such provider, or it does not work here.
    """
    hosts = _HOSTS.setdefault(asyncio.get_running_loop(), {})
    shared = hosts.get(_key(args))
    if shared is None:
        shared = _SharedHost(TaskHost(load_provider(args)))
        hosts[_key(args)] = shared
    shared.users.add(user)
    return shared.host


async def release_host(user: object, args: TaskArgs) -> None:
    """Close the host if this was its last user; a second call does nothing."""
    hosts = _HOSTS.get(asyncio.get_running_loop(), {})
    shared = hosts.get(_key(args))
    if shared is None or user not in shared.users:
        return
    shared.users.discard(user)
    if not shared.users:
        del hosts[_key(args)]
        await shared.host.close()


def _key(args: TaskArgs) -> str:
    return f"{args.provider} {json.dumps(args.provider_args, sort_keys=True)}"
