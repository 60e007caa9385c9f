"""A worker of the tests: does what a call's text says. With a second argument it forks others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
from msgspec.msgpack import Decoder

from rlearner_workers.calls import serve_calls
from rlearner_workers.forkserver import Forkserver, RequestRefused, send_report
from rlearner_workers.frames import read_frame
from rlearner_workers.limits import ResourceLimits


class Echo(msgspec.Struct, frozen=True):
    text: str
    pid: int = 0


class EchoSetup(msgspec.Struct, frozen=True):
    refusal: str
    memory_mib: int | None = None


ECHOES = Decoder(Echo)
BALLAST: list[bytearray] = []
CONNECTIONS: list[socket.socket] = []


def answer(content: msgspec.Raw) -> tuple[Echo, bool]:
    text = ECHOES.decode(content).text
    match text:
        case "hang":
            time.sleep(600)
        case "spin":
            while True:
                pass
        case "die":
            os._exit(7)
        case "abort":
            os.kill(os.getpid(), signal.SIGABRT)
        case "lie":
            CONNECTIONS[0].sendall(b"\xff" * 4096)
            time.sleep(600)
        case "close":
            CONNECTIONS[0].shutdown(socket.SHUT_RDWR)
            time.sleep(600)
        case "grow":  # in children, none of which is over the limit
            code = "import time; ballast = bytearray(b'x') * (60 << 20); time.sleep(600)"
            children = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(3)]
            children[0].wait()
        case "nap":
            time.sleep(0.3)
        case "print":  # a gigabyte
            for _ in range(1 << 14):
                os.write(1, b"x" * 65535 + b"\n")
    return Echo(text, os.getpid()), text == "spent"


def serve_echoes(connection: socket.socket, _: ResourceLimits | None = None) -> None:
    CONNECTIONS.append(connection)
    with connection:
        serve_calls(connection, answer)


def main(connection: socket.socket) -> None:
    if sys.argv[2:] != ["fork"]:
        serve_echoes(connection)
        return
    data = read_frame(connection.fileno())
    assert data is not None
    setup = msgspec.msgpack.decode(data, type=EchoSetup)
    if setup.refusal:
        send_report(connection, RequestRefused(setup.refusal))
        return
    Forkserver(connection, serve_echoes, setup.memory_mib).run()


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
