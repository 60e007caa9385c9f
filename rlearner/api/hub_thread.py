"""A reward hub in this process, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from broker.errors import reason_of
from broker.runtime.process import Stop, Stopped, join, unless_stopped
from rewardhub.cli import parser
from rewardhub.function_pool import FunctionPool
from rewardhub.rewards.base import Score
from rewardhub.rewards.caller import POOL
from rewardhub.service import RewardhubService

HUB: Final = "caller-1"
POLL_S: Final = 0.1
CLOSE_S: Final = 15.0
# Without a handler, Python prints warnings of lost connections, as at the run's end.
QUIET: Final = logging.NullHandler()


class HubThread:
    """Reward hub that scores a run's pool ``caller`` with functions of this process.

    Args:
        functions: by the name of their rewards.
        run: name of the run.
        find_address: returns the address of its broker, empty while there is none.
        report_failure: called in the thread with the name of the function that failed (empty: the
            hub itself) and the error.
    """

    def __init__(
        self,
        functions: Mapping[str, Score],
        run: str,
        find_address: Callable[[], str],
        report_failure: Callable[[str, BaseException], None],
    ) -> None:
        self._functions = functions
        self._run = run
        self._find_address = find_address
        self._report_failure = report_failure
        self._stop = Stop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_loop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="reward-hub", daemon=True)

    def start(self) -> None:
        logging.getLogger("broker").addHandler(QUIET)
        self._thread.start()

    def close(self) -> None:
        """Let the hub leave its run, and wait for it."""
        self._has_loop.wait()
        for end in (lambda: self._stop.request("the run ends"), _cancel_tasks):
            # The hub may end by itself at any moment.
            with suppress(RuntimeError):
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(end)
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                break

    def _work(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._loop = runner.get_loop()
                self._has_loop.set()
                runner.run(self._serve())
        except (Stopped, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001 - it ends the run with its reason
            self._report_failure("", error)

    async def _serve(self) -> None:
        url = await unless_stopped(self._stop, self._wait_for_address())
        options = parser().parse_args(["--broker", url, "--run", self._run, "--id", HUB])
        async with join("rewardhub", options, self._stop) as member:
            # The root logger is the program's: a handler there would end its own setup.
            member.logger = logging.getLogger("rewardhub")

            def report(name: str, error: BaseException) -> None:
                self._report_failure(name, error)
                # Groups in hand go back at once, instead of waiting for their scores.
                member.follow("stopped", f"{name}: {reason_of(error)}")

            functions = FunctionPool(self._functions, member.settings.rewardhub.timeout_s, report)
            await RewardhubService(member, pools=[POOL], functions=functions).run()

    async def _wait_for_address(self) -> str:
        # Another process writes it to a file.
        while not (url := self._find_address()):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return url


def _cancel_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
