"""Calls environments under a timeout: on the event loop, awaited if they are async, or in a thread.

A thread cannot be stopped. One that hangs is abandoned, counted and replaced, so that a hanging
environment costs only its own episode; a hub that has lost too many threads exits, so that another
can start.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final

from broker.errors import RlearnerError, described
from broker.runtime.load_curve import LoadCurve
from broker.system.fault import told, trace
from envhub.envs.base import Environment
from rlearner_workers.patience import OutOfTime, answer_within

log = logging.getLogger(__name__)

# threads kept for later
IDLE_THREADS: Final = 64

Method = Callable[..., Any]
Args = tuple[Any, ...]
TimeoutMaker = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]


class CallFailed(RlearnerError):
    """The environment raised, or did not return in time; ``trace`` is its traceback, if any."""

    def __init__(self, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.trace = trace


class EnvironmentCalls:
    """Runs environment methods for one event loop.

    Args:
        timeout_s: of each call.
        timeout: limits a call, by a clock of its own.

    Attributes:
        hung: threads in an abandoned call.
        curve: how long a reset or step of an episode takes at which load.
    """

    def __init__(self, timeout_s: float, timeout: TimeoutMaker = asyncio.timeout) -> None:
        self._timeout_s = timeout_s
        self._timeout = timeout
        self._idle: deque[_Worker] = deque()
        self._busy: dict[Environment, asyncio.Future[Any]] = {}  # abandoned calls
        self._retiring: set[asyncio.Task[None]] = set()
        self.hung = 0
        self.curve = LoadCurve(lambda: 1 << 30)

    async def make(self, create: Callable[[], Environment], *, in_thread: bool) -> Environment:
        """Return a new environment.

        Raises:
            CallFailed: as ``call``.
        """
        environment: Environment = await self._run(None, "constructor", create, (), in_thread)
        return environment

    async def call(self, environment: Environment, method: str, *args: Any) -> Any:
        """Return what the method returns.

        Raises:
            CallFailed: if it raises or exceeds the timeout; the environment must not be used again.
        """
        if environment.isolation == "thread":
            return await self._run(
                environment, method, getattr(environment, method), args, in_thread=True
            )
        try:
            result = getattr(environment, method)(*args)
        except BaseException as error:
            # it may be the user's code; a cancellation cannot arrive here
            raise _call_failed(method, error) from error
        if not hasattr(result, "__await__"):
            return result
        pid = getattr(environment, "pid", 0) if environment.isolation == "process" else 0
        return await self._await_result(method, result, pid)

    def retire(self, environment: Environment) -> None:
        """Close an environment for good, once its abandoned call, if any, returns."""
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
        """End the idle threads; hanging ones end with the process."""
        for task in self._retiring:
            task.cancel()
        while self._idle:
            self._idle.popleft().stop()

    async def _run(
        self, env: Environment | None, name: str, function: Method, args: Args, in_thread: bool
    ) -> Any:
        try:
            if in_thread and not inspect.iscoroutinefunction(function):
                return await self._in_thread(env, name, function, args)
            result = function(*args)
        except CallFailed:
            raise
        except BaseException as error:
            # it may be the user's code
            if _from_outside(error):
                raise
            raise _call_failed(name, error) from error
        if not hasattr(result, "__await__"):
            return result
        return await self._await_result(name, result)

    async def _await_result(self, name: str, work: Awaitable[Any], pid: int = 0) -> Any:
        try:
            if pid:
                return await self._within_own_clock(name, work, pid)
            return await self._within(name, work)
        except CallFailed:
            raise
        except BaseException as error:
            if _from_outside(error):
                raise
            raise _call_failed(name, error) from error

    async def _within(self, name: str, work: Awaitable[Any]) -> Any:
        try:
            async with self._timeout(self._timeout_s) as limit:
                return await work
        except TimeoutError:
            if limit.expired():
                raise CallFailed(f"{name} did not return within {self._timeout_s:g} s") from None
            raise  # its own

    async def _within_own_clock(self, name: str, work: Awaitable[Any], pid: int) -> Any:
        """Await what a worker process answers, within the timeout on its own clock."""
        try:
            return await answer_within(_await_work(work), pid, self._timeout_s)
        except OutOfTime:
            raise CallFailed(f"{name} did not return within {self._timeout_s:g} s") from None

    async def _in_thread(
        self, env: Environment | None, name: str, function: Method, args: Args
    ) -> Any:
        worker = self._idle.pop() if self._idle else _Worker(asyncio.get_running_loop())
        future = worker.submit(function, args)
        try:
            # shielded, as a thread cannot be cancelled
            return await self._within(name, asyncio.shield(future))
        finally:
            if future.done():
                self._keep(worker)
            else:
                self.hung += 1
                if env is not None:
                    # closing it has to wait for this call
                    self._busy[env] = future
                future.add_done_callback(partial(self._return_late, env, worker))

    def _return_late(
        self, environment: Environment | None, worker: _Worker, future: asyncio.Future[Any]
    ) -> None:
        self.hung -= 1
        if environment is not None:
            self._busy.pop(environment, None)
        if not future.cancelled():
            # retrieved, so that asyncio does not log it
            future.exception()
        self._keep(worker)

    def _keep(self, worker: _Worker) -> None:
        if len(self._idle) < IDLE_THREADS:
            self._idle.append(worker)
        else:
            worker.stop()


async def _await_work(work: Awaitable[Any]) -> Any:
    return await work


def _from_outside(error: BaseException) -> bool:
    """Return whether an error is a cancellation of this task, not the environment's own."""
    task = asyncio.current_task()
    cancelled = (
        isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0
    )
    return cancelled or isinstance(error, GeneratorExit)


def raised(name: str, error: BaseException) -> str:
    """Say in one line what a method raised and where."""
    return f"{name} raised {told(error)}"


def _call_failed(name: str, error: BaseException) -> CallFailed:
    return CallFailed(raised(name, error), trace(error))


class _Worker:
    """One daemon thread, so that a hanging call does not keep the process from ending."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._wake = threading.Semaphore(0)
        self._job: tuple[Method, Args, asyncio.Future[Any]] | None = None
        threading.Thread(target=self._work, name="environment", daemon=True).start()

    def submit(self, function: Method, args: Args) -> asyncio.Future[Any]:
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
            result = None
            error = None
            try:
                result = function(*args)
            except BaseException as caught:  # noqa: BLE001 - handed to the caller
                error = caught
            try:
                self._loop.call_soon_threadsafe(_resolve_future, future, result, error)
            except RuntimeError:
                # the loop is closed: the process ends
                return


def _resolve_future(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        future.set_exception(error)
    else:  # a future takes no StopIteration, and others would end the event loop
        future.set_exception(RuntimeError(described(error)).with_traceback(error.__traceback__))
