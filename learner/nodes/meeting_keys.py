"""Keys and values of the rendezvous of nodes."""

from __future__ import annotations

from typing import Final

import msgspec

# Lines of the ranks that want to join.
ARRIVALS: Final = "arrivals"


class Farewell(msgspec.Struct, frozen=True):
    """Why a rank ends by itself."""

    line: str
    code: int


class Arrival(msgspec.Struct, frozen=True):
    """A rank that wants to join."""

    node: int
    local_rank: int
    token: str


def arrival_line(node: int, local_rank: int, token: str) -> bytes:
    """Return what a rank appends to the arrivals."""
    return msgspec.json.encode(Arrival(node, local_rank, token)) + b"\n"


def parse_arrivals(value: bytes) -> list[Arrival]:
    """Return the ranks that have appended lines."""
    return [msgspec.json.decode(line, type=Arrival) for line in value.splitlines()]


def answer_key(token: str) -> str:
    """Return the key under which a rank finds the port of its link."""
    return f"answer/{token}"


def farewell_key(node: int, local_rank: int) -> str:
    """Return the key under which a rank says why it ends."""
    return f"farewell/{node}/{local_rank}"
