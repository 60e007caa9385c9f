"""Reads the output of commands from pipes, without waiting for the daemons that keep them open."""

from __future__ import annotations

import asyncio
import contextlib
import os

from rlearner_sandbox.providers.base import OnOutput, Stream

_PIECE = 1 << 16


class OutputPipe:
    """One stream of a command.

    Attributes:
        write_fd: the end for the command; to be closed here once it has been passed on.
        data: what was kept.
        is_truncated: whether there was more.
    """

    def __init__(self, name: Stream, max_bytes: int, on_output: OnOutput | None) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_fd, False)
        self.data = bytearray()
        self.is_truncated = False
        self._is_over = False
        self._loop.add_reader(self._read_fd, self._read)

    def close_write_end(self) -> None:
        """Close the command's end here."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def finish(self) -> bytes:
        """Take what is still in the pipe and return all that was kept.

        Daemons of the command may write on: that is read and dropped until ``close``.
        """
        while not self._is_over and self._read():
            pass
        kept = bytes(self.data)
        self._is_over = True
        self._on_output = None
        return kept

    def close(self) -> None:
        """Stop reading."""
        self.close_write_end()
        if self._read_fd >= 0:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1

    @property
    def is_closed(self) -> bool:
        """Whether nobody has the other end any more."""
        return self._read_fd < 0

    def _read(self) -> bool:
        if self._read_fd < 0:
            return False
        try:
            piece = os.read(self._read_fd, _PIECE)
        except BlockingIOError:
            return False
        if not piece:
            self.close()
            return False
        if not self._is_over:
            kept = piece[: self._max_bytes - len(self.data)]
            self.data += kept
            self.is_truncated |= len(kept) < len(piece)
            if kept and self._on_output is not None:
                with contextlib.suppress(Exception):
                    self._on_output(self._name, kept)
        return True
