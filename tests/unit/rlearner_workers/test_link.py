"""Messages over a socket pair, and what ends a link."""

from __future__ import annotations

import socket

import msgspec
import pytest
from msgspec.msgpack import Decoder

from rlearner_workers.frames import pack_frame
from rlearner_workers.link import InvalidMessage, LinkClosed, MessageLink


class Note(msgspec.Struct, frozen=True):
    text: str


async def open_links(max_bytes: int | None = None) -> tuple[MessageLink[Note], MessageLink[Note]]:
    ours, theirs = socket.socketpair()
    notes = Decoder(Note)
    return await MessageLink.open(ours, notes, max_bytes), await MessageLink.open(theirs, notes)


async def test_nothing_is_sent_after_the_end() -> None:
    ours, theirs = await open_links()
    theirs.send(Note("first"))
    theirs.end()
    theirs.send(Note("second"))
    assert await ours.receive() == Note("first")
    with pytest.raises(LinkClosed, match="the other end closed"):
        await ours.receive()
    assert await ours.receive_or_none() is None
    ours.close()
    theirs.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pack_frame(b"\xc1"), "MessagePack data is malformed"),
        (b"\xff" * 4, "4294967295 bytes, the limit is 64"),
    ],
)
async def test_invalid_message_has_its_own_error(data: bytes, reason: str) -> None:
    ours, theirs = socket.socketpair()
    link = await MessageLink.open(ours, Decoder(Note), 64)
    with theirs:
        theirs.sendall(data)
        with pytest.raises(InvalidMessage, match=reason):
            await link.receive()
    link.close()


async def test_call_to_a_closed_link_fails() -> None:
    ours, theirs = await open_links()
    theirs.close()
    with pytest.raises(LinkClosed):
        await ours.call(Note("to nobody"))
    ours.close()
