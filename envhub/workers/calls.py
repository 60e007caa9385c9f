"""Calls into environments under a timeout: on the loop, awaited where they are async, or in a thread.

A thread cannot be stopped. One that hangs is left behind, counted, and replaced by another, so that a hanging
environment costs its own episode and no other turn; a hub that has lost too many threads exits, so that another can
start.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from broker.errors import RlearnerError
from broker.system.workers.fault import told, trace
from envhub.envs.base import Environment

log = logging.getLogger(__name__)

IDLE_THREADS: Final = 64  # threads kept for later


class CallFailed(RlearnerError):
    """The environment raised, or did not come back in time. ``trace``: what it raised, for the log, empty if
    nothing.
    """

    def __init__(self, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.trace = trace


class EnvironmentCalls:
    """Runs environment methods for one event loop.

    Attributes:
        hung: threads that are in a call nobody waits for any more.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._idle: deque[_Worker] = deque()
        self._busy: dict[Environment, asyncio.Future[Any]] = {}  # calls that nobody waits for any more
        self._retiring: set[asyncio.Task[None]] = set()
        self.hung = 0

    async def make(self, create: Callable[[], Environment], *, in_thread: bool) -> Environment:
        """A new environment.

        Raises:
            CallFailed: see ``call``.
        """
        made: Environment = await self._run(None, "constructor", create, (), in_thread)
        return made

    async def call(self, environment: Environment, method: str, *args: Any) -> Any:
        """What the method returns.

        Raises:
            CallFailed: it raised, or took longer than the timeout; the environment must not be used again.
        """
        if environment.isolation == "thread":
            return await self._run(environment, method, getattr(environment, method), args, in_thread=True)
        try:
            result = getattr(environment, method)(*args)
        except BaseException as error:  # the environment is someone else's code; no cancellation gets in here
            raise _failed(method, error) from error
        return await self._awaited(method, result) if hasattr(result, "__await__") else result

    def retire(self, environment: Environment) -> None:
        """Close an environment that will not be used again, once the call it may still be in comes back."""
        task = asyncio.create_task(self._retire(environment))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _retire(self, environment: Environment) -> None:
        if (future := self._busy.get(environment)) is not None:
            await asyncio.wait({future})
        try:
            await self.call(environment, "close")
        except CallFailed as error:
            log.warning("%s: %s", type(environment).__name__, error)

    def close(self) -> None:
        """End the idle threads; those that hang end with the process."""
        for task in self._retiring:
            task.cancel()
        while self._idle:
            self._idle.popleft().stop()

    async def _run(
        self,
        environment: Environment | None,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        in_thread: bool,
    ) -> Any:
        try:
            if in_thread and not inspect.iscoroutinefunction(function):
                return await self._in_thread(environment, name, function, args)
            result = function(*args)
        except CallFailed:
            raise
        except BaseException as error:  # the environment is someone else's code
            if _from_outside(error):
                raise
            raise _failed(name, error) from error
        return await self._awaited(name, result) if hasattr(result, "__await__") else result

    async def _awaited(self, name: str, work: Awaitable[Any]) -> Any:
        try:
            return await self._within(name, work)
        except CallFailed:
            raise
        except BaseException as error:
            if _from_outside(error):
                raise
            raise _failed(name, error) from error

    async def _within(self, name: str, work: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise CallFailed(f"{name} did not return within {self._timeout_s:g} s") from None
            raise  # its own

    async def _in_thread(
        self, environment: Environment | None, name: str, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> Any:
        worker = self._idle.pop() if self._idle else _Worker(asyncio.get_running_loop())
        future = worker.submit(function, args)
        try:
            return await self._within(name, asyncio.shield(future))
        finally:
            if future.done():
                self._keep(worker)
            else:
                self.hung += 1
                if environment is not None:
                    self._busy[environment] = future
                future.add_done_callback(lambda ended: self._came_back(environment, worker, ended))

    def _came_back(self, environment: Environment | None, worker: _Worker, ended: asyncio.Future[Any]) -> None:
        self.hung -= 1
        if environment is not None:
            self._busy.pop(environment, None)
        if not ended.cancelled():
            ended.exception()  # nobody waits for it any more
        self._keep(worker)

    def _keep(self, worker: _Worker) -> None:
        if len(self._idle) < IDLE_THREADS:
            self._idle.append(worker)
        else:
            worker.stop()


def _from_outside(error: BaseException) -> bool:
    """Whether it is no error of the environment's: this task is being cancelled."""
    task = asyncio.current_task()
    cancelled = isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    return cancelled or isinstance(error, GeneratorExit)


def raised(name: str, error: BaseException) -> str:
    """What a method raised and where, in one line."""
    return f"{name} raised {told(error)}"


def _failed(name: str, error: BaseException) -> CallFailed:
    return CallFailed(raised(name, error), trace(error))


class _Worker:
    """One daemon thread: unlike the standard pool's, it does not hold up the end of the process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wake = threading.Semaphore(0)
        self._job: tuple[Callable[..., Any], tuple[Any, ...], asyncio.Future[Any]] | None = None
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        self._job = (function, args, future)
        self._wake.release()
        return future

    def stop(self) -> None:
        self._job = None
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            if self._job is None:
                return
            function, args, future = self._job
            result, error = None, None
            try:
                result = function(*args)
            except BaseException as caught:  # noqa: BLE001 - handed to the caller
                error = caught
            try:
                self._loop.call_soon_threadsafe(_resolve, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process ends


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):  # which no future takes
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(f"{type(error).__name__}: {error}").with_traceback(error.__traceback__))
