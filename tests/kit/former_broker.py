"""A broker as it was configured before joining roles had accounts: one account, replies wherever a
message says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.contract.permissions import LEARNER, OBSERVER, OPERATOR, permissions
from broker.contract.streams import REQUEST, STREAMS, StreamKind
from broker.identity import key_folder
from broker.identity.server_config import ServerUser
from broker.server import private_server
from broker.server.private_server import BrokerServer

READ = (StreamKind.LOG, StreamKind.LAST_VALUE, StreamKind.KV)
CONSUMER = (
    "CONSUMER.CREATE.{}",
    "CONSUMER.MSG.NEXT.{}.*",
    "CONSUMER.DELETE.{}.*",
    "DIRECT.GET.{}.>",
)


def former_authorization(users: Iterable[ServerUser]) -> str:
    """Return the block that all users had."""
    lines = ["authorization {", "  users = ["]
    for user in users:
        allowed = permissions(user.role, user.run, user.name)
        publish = list(allowed.publish)
        if user.role not in (OPERATOR, LEARNER, OBSERVER):
            names = [
                one.stream_name(user.run)
                for one in STREAMS
                if one.kind in READ and one.reads(user.role)
            ]
            publish += [f"$JS.API.{request.format(name)}" for name in names for request in CONSUMER]
            publish.remove("_R_.>")
        subscribe = json.dumps(list(allowed.subscribe))
        replies = user.role == OPERATOR or any(
            one.kind is REQUEST and one.reads(user.role) for one in STREAMS
        )
        lines.append(f"    {{ {user.shows}, permissions: {{")
        lines.append(
            f"      publish: {{ allow: {json.dumps(publish)} }}, subscribe: {{ allow: {subscribe} }}"
        )
        lines += ["      allow_responses: { max: 1, expires: 600s }"] * replies
        lines.append("    } }")
    return "\n".join([*lines, "  ]", "}"]) + "\n"


@contextmanager
def former_configuration() -> Iterator[None]:
    """Let brokers of this process start as they did, and keys that it makes be told to them so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_folder, "format_accounts", former_authorization)
        patch.setattr(private_server, "move_streams", lambda *_, **__: None)
        yield


@contextmanager
def former_broker(store: Path) -> Iterator[BrokerServer]:
    """Yield a running broker of that kind; its keys must be made in this process."""
    with former_configuration(), BrokerServer(str(store), store_max_gib=64) as server:
        yield server
