"""Packs several messages of the request channel into one, as a MessagePack list of (token, message)
pairs.

Requests and replies come in bursts, because a generation server answers many after one decoding
step. ZeroMQ takes as long for one small message as for a bundle, and wakes its I/O thread for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from broker.contract.sizes import MAX_PAYLOAD_BYTES
from broker.errors import WireError

Entry = tuple[str, bytes]  # token and message

FULL_AT: Final = 256  # messages in one bundle
FULL_BYTES: Final = 64 * 1024  # of messages in one bundle; a larger message is sent alone
MAX_TOKEN_CHARS: Final = 64
# one message of the largest size
MAX_BUNDLE_BYTES: Final = MAX_PAYLOAD_BYTES + 4 * MAX_TOKEN_CHARS + 16

_Token = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN_CHARS)]
_Entries = Annotated[list[tuple[_Token, bytes]], msgspec.Meta(max_length=FULL_AT)]

pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(_Entries).decode


def cut_bundles(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    """Yield the entries in order, each time as many as fit into one bundle."""
    begin = size = 0
    for index, (_, data) in enumerate(entries):
        if index > begin and (size + len(data) > FULL_BYTES or index - begin == FULL_AT):
            yield entries[begin:index]
            begin = index
            size = 0
        size += len(data)
    if begin < len(entries):
        yield entries[begin:]


def unpack_bundle(data: bytes) -> list[Entry]:
    """Return the entries of a bundle.

    Raises:
        WireError: if the data is not a bundle.
    """
    try:
        entries: list[Entry] = _unpack(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(f"not a bundle of messages: {' '.join(str(error).split())[:200]}") from None
    return entries
