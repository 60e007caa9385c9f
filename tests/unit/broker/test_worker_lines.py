"""The worker's side of the socket to its hub."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from broker.system.workers import line


def test_questions_and_answers_are_framed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, theirs.makefile("rb") as stream:
        ours.sendall(line.frame(b"one") + line.frame(b""))
        assert [line.read(stream), line.read(stream)] == [b"one", b""]
        assert line.write(theirs, b"two")
        assert ours.recv(100) == b"\x03\x00\x00\x00two"
        ours.close()
        assert line.read(stream) is None
        assert not line.write(theirs, b"three")


def test_a_worker_whose_hub_has_hung_up_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", "rewardhub.worker", str(theirs.fileno()), "0"]
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, env={**os.environ}
        ) as worker:
            theirs.close()
            ours.sendall(line.frame(b"nothing that it understands"))
            ours.shutdown(socket.SHUT_RD)
            ours.close()
            _, said = worker.communicate(timeout=60)
    assert (worker.returncode, said) == (0, b"")
