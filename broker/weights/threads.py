"""Tasks and threads of the weight channel.

Each blocking call gets a daemon thread: one that hangs in torch is left behind instead of awaited.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar
from weakref import WeakSet

from broker.errors import RlearnerError, TransferFailed
from broker.weights.group import WATCHES, WaitMonitor

STUCK_AFTER_S: Final = 10.0  # beyond the longest wait that a thread has agreed to
# a cancelled thread that takes longer hangs in a call without a timeout
LEAVE_WITHIN_S: Final = 1.0

log = logging.getLogger(__name__)
T = TypeVar("T")
_threads: WeakSet[threading.Thread] = WeakSet()


def spawn(body: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task whose failure is logged at once."""
    task = asyncio.create_task(body)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, RlearnerError):  # its text is sufficient, for example about a lost store
        log.error("weights: the channel stopped working here: %s", error)
    else:
        log.critical("weights: the channel stopped working here: %r", error, exc_info=error)


class ChannelTasks:
    """Tasks of one end of the channel."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def spawn(self, body: Coroutine[Any, Any, None]) -> None:
        """Add a task."""
        task = spawn(body)
        self._running.add(task)
        task.add_done_callback(self._ended)

    async def join(self) -> None:
        """Wait forever; raise the error of the first task that fails."""
        await asyncio.shield(self._broken)

    async def cancel(self) -> None:
        """Cancel all tasks."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not self._broken.done()
        ):
            self._broken.set_exception(error)
            self._broken.exception()  # it is logged; mark it as retrieved


def in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run the call in a thread; the future has its result or exception. Cancelling the future does
    not stop it.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None itself

    def run() -> None:
        result = None
        failure = None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001  # raised again where the future is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return future


async def patiently(future: asyncio.Future[T], watch: WaitMonitor, timeout_s: float) -> T:
    """Wait for a thread while it shows progress.

    Raises:
        TransferFailed: the thread's own error, or if it is stuck in a call without a timeout.
    """
    # a caller that left does not retrieve the result
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    while not future.done():
        await asyncio.wait({future}, timeout=0.5)
        silent_s = time.monotonic() - watch.beat_at
        if not future.done() and silent_s > (
            LEAVE_WITHIN_S if watch.reason else timeout_s + STUCK_AFTER_S
        ):
            future.cancel()
            watch.cancel(f"stuck for {silent_s:.0f} s; the learner may be stopped")
            raise TransferFailed(watch.reason)
    return future.result()


@atexit.register
def leave(within_s: float = 1.0) -> None:
    """Cancel all waits: Python would end a daemon thread inside torch by aborting the process."""
    for watch in list(WATCHES):
        watch.cancel("the process ends")
    deadline = time.monotonic() + within_s
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
