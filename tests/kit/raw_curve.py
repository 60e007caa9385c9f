"""A client of CurveZMQ on a plain socket, which can send what no ZeroMQ library would: see RFC 26
and ZMTP 3.0.
"""

from __future__ import annotations

import socket
import struct

from nacl.public import Box, PrivateKey, PublicKey
from zmq.utils import z85

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


class RawCurve:
    """One connection after its handshake.

    Args:
        server_key, public, secret: in Z85.
    """

    def __init__(self, place: tuple[str, int], server_key: str, public: str, secret: bytes) -> None:
        self._socket = socket.create_connection(place, timeout=10)
        self._nonce = 0
        server, mine = PublicKey(z85.decode(server_key)), PrivateKey(z85.decode(secret))
        brief = PrivateKey.generate()
        self._socket.sendall(GREETING)
        self._read(64)
        hello = self._box(Box(brief, server), b"CurveZMQHELLO---", bytes(64))
        self._command(b"\x05HELLO\x01\x00" + bytes(72) + bytes(brief.public_key) + hello)
        welcome = self._receive()[8:]
        opened = Box(brief, server).decrypt(welcome[16:], b"WELCOME-" + welcome[:16])
        theirs, cookie = PublicKey(opened[:32]), opened[32:]
        vouch = bytes(16)
        sealed = (
            Box(mine, theirs)
            .encrypt(bytes(brief.public_key) + bytes(server), b"VOUCH---" + vouch)
            .ciphertext
        )
        metadata = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        self._session = Box(brief, theirs)
        inside = z85.decode(public) + vouch + sealed + metadata
        self._command(
            b"\x08INITIATE" + cookie + self._box(self._session, b"CurveZMQINITIATE", inside)
        )
        ready = self._receive()
        assert ready.startswith(b"\x05READY"), ready[:10]

    def send(self, data: bytes, *, more: bool) -> None:
        """Send one part of a message."""
        box = self._box(self._session, b"CurveZMQMESSAGEC", (b"\x01" if more else b"\0") + data)
        body = b"\x07MESSAGE" + box
        self._socket.sendall(_header(0, len(body)) + body)

    def close(self) -> None:
        self._socket.close()

    def _box(self, box: Box, prefix: bytes, data: bytes) -> bytes:
        self._nonce += 1
        short = struct.pack(">Q", self._nonce)
        return short + box.encrypt(data, prefix + short).ciphertext

    def _command(self, body: bytes) -> None:
        self._socket.sendall(_header(4, len(body)) + body)

    def _receive(self) -> bytes:
        flags = self._read(1)[0]
        return self._read(struct.unpack(">Q", self._read(8))[0] if flags & 2 else self._read(1)[0])

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            if not (part := self._socket.recv(count - len(data))):
                raise ConnectionError("the server closed the connection")
            data += part
        return data


def _header(flags: int, size: int) -> bytes:
    return bytes([flags, size]) if size < 256 else bytes([flags | 2]) + struct.pack(">Q", size)
