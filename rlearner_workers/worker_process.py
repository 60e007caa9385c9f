"""A child process that answers calls, as its parent sees it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from broker.errors import RlearnerError
from broker.system.children import cpu_s
from broker.system.process_tree import kill_tree, process_tree, resident_mib
from rlearner_workers import calls, limits
from rlearner_workers.frames import MAX_ANSWER_BYTES
from rlearner_workers.link import InvalidMessage, LinkClosed, MessageLink
from rlearner_workers.patience import OutOfTime, answer_within
from rlearner_workers.start import start, start_with_socket

# From the end of a worker's socket to that of its process.
LAST_BREATH_S = 1.0

Answer = TypeVar("Answer")


class WorkerGone(RlearnerError):
    """The process has ended, was killed, or sent something that is no answer; says which."""


class WorkerProcess(Generic[Answer]):
    """One process and the link to it, with any number of open calls.

    Args:
        answers: decodes the content of its answers.

    Attributes:
        gone: how it ended; empty while it runs.
        is_spent: whether it asked to be replaced.
    """

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        link: MessageLink[calls.CallAnswer],
        answers: Decoder[Answer],
    ) -> None:
        self.child = child
        self.gone = ""
        self.is_spent = False
        self._link = link
        self._answers = answers
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._num_heard = 0
        self._base_mib = 0.0
        self._used_s = 0.0
        self._is_closed = False
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls,
        module: str,
        output: IO[bytes],
        answers: Decoder[Answer],
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        passed: Iterable[str] = (),
    ) -> WorkerProcess[Answer]:
        """Start ``module``, which serves ``calls.serve_calls`` or its concurrent form.

        Args:
            env: variables added to its environment.
            passed: further variables of this process that it gets.

        Raises:
            OSError: if it cannot be started.
        """

        def launch(theirs: socket.socket) -> subprocess.Popen[bytes]:
            return start(module, theirs, output, arguments=arguments, env=env, passed=passed)

        child, ours = await start_with_socket(launch)
        return cls(child, await MessageLink.open(ours, calls.ANSWERS, MAX_ANSWER_BYTES), answers)

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def num_open(self) -> int:
        """Calls without an answer yet."""
        return len(self._open)

    async def call(self, request: msgspec.Struct, limit_s: float, name: str = "") -> Answer:
        """Send a request and return its answer.

        Args:
            limit_s: on the process's own clock: a machine without a free processor costs nothing.
            name: of what it does, to log that it is slow.

        Raises:
            OutOfTime: if no answer comes in time; a process that has sent nothing at all since the
                request is killed.
            WorkerGone: if the process has ended.
        """
        if self.gone:
            raise WorkerGone(self.gone)
        number = next(self._numbers)
        num_heard = self._num_heard
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        try:
            self._link.send(calls.WorkerCall(number, calls.pack_content(request)))
            return await answer_within(_await_answer(answer), self.pid, limit_s, name)
        except OutOfTime:
            if self._num_heard == num_heard:
                self.kill(f"was killed: it answered nothing for {limit_s:g} s")
            raise
        finally:
            del self._open[number]
            if not self.gone and not (answer.done() and not answer.cancelled()):
                self._link.send(calls.CancelCall(number))

    def count_as_free(self) -> None:
        """Do not count its memory of now, and that of its descendants, in ``enforce_memory``."""
        self._base_mib = resident_mib(process_tree(self.pid))

    def enforce_memory(self, memory_mib: int) -> None:
        """Kill it if it and its descendants take more than this beyond what is free."""
        if self._base_mib and not self.gone:
            used_mib = resident_mib(process_tree(self.pid)) - self._base_mib
            if used_mib > memory_mib:
                self.kill(limits.too_much(used_mib, memory_mib))

    def kill(self, cause: str) -> None:
        """Kill it and its descendants."""
        self.gone = self.gone or cause
        self.cpu_s()  # read before it is gone
        kill_tree(self.pid)

    def cpu_s(self) -> float:
        """Return the processor seconds that it has used."""
        self._used_s = max(self._used_s, cpu_s(self.pid))
        return self._used_s

    async def close(self) -> None:
        """Kill it and wait for it."""
        if self._is_closed:
            return
        self._is_closed = True
        self.kill("was closed")
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)
        self._link.close()
        await asyncio.to_thread(self.child.wait)

    async def _listen(self) -> None:
        try:
            while True:
                reply = await self._link.receive()
                self._num_heard += 1
                self.is_spent = self.is_spent or reply.is_spent
                answer = self._open.get(reply.number)
                if answer is not None and not answer.done():
                    answer.set_result(self._answers.decode(reply.content))
        except LinkClosed:
            self.kill(self.gone or await self._describe_end())
        except (InvalidMessage, msgspec.DecodeError) as error:
            self.kill(f"sent an answer that cannot be decoded: {error}")
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(WorkerGone(self.gone))

    async def _describe_end(self) -> str:
        try:
            return limits.how_ended(await asyncio.to_thread(self.child.wait, LAST_BREATH_S))
        except subprocess.TimeoutExpired:
            return "closed its socket"


async def _await_answer(answer: asyncio.Future[Any]) -> Any:
    return await answer
