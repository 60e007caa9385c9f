"""Frames between a process and its worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from rlearner_workers.frames import FrameTooLong, pack_frame, read_frame, write_frame


def test_frames_until_the_other_end_closes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack_frame(b"one") + pack_frame(b""))
        fd = theirs.fileno()
        assert [read_frame(fd), read_frame(fd)] == [b"one", b""]
        assert write_frame(fd, b"two")
        assert ours.recv(100) == b"\x03\x00\x00\x00two"
        ours.close()
        assert read_frame(fd) is None
        assert not write_frame(fd, b"three")


def test_half_a_frame_is_none() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(pack_frame(b"whole")[:-1])
        assert read_frame(theirs.fileno()) is None


def test_announced_size_is_refused_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff" * 8)
        with pytest.raises(FrameTooLong, match=r"^4294967295 bytes, the limit is 8$"):
            read_frame(theirs.fileno(), 8)


def test_worker_of_a_lost_hub_ends_in_silence() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.set_inheritable(True)
        command = [sys.executable, "-m", "rewardhub.worker", str(theirs.fileno()), "0"]
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, env={**os.environ}
        ) as worker:
            theirs.close()
            ours.sendall(pack_frame(b"nothing that it understands"))
            ours.shutdown(socket.SHUT_RD)
            ours.close()
            _, output = worker.communicate(timeout=60)
    assert (worker.returncode, output) == (0, b"")
