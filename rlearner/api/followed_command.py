"""A command and, in this process, the reward hub of the functions that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from broker.errors import UserError, described
from broker.settings.run_address import address_by
from broker.system import fault
from rewardhub.rewards.base import NoScore, Score
from rewardhub.rewards.caller import VARIABLE
from rlearner.api.command_process import CommandProcess
from rlearner.api.hub_thread import HubThread


class FollowedCommand:
    """A running command; a function that fails ends it.

    Args:
        words: the command and its arguments.
        folder: of its run, where it notes its broker.
        functions: rewards that this process computes, by name.
    """

    def __init__(self, words: Sequence[str], folder: Path, functions: Mapping[str, Score]) -> None:
        self._failure: tuple[str, BaseException] | None = None
        self._hub: HubThread | None = None
        self._process = CommandProcess(words, {VARIABLE: ",".join(functions)})
        if functions:
            find_address = partial(address_by, folder, self._process.pid)
            self._hub = HubThread(functions, folder.name, find_address, self._report_failure)
            self._hub.start()

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that the command prints, until it has ended."""
        return self._process.events()

    def stop(self) -> None:
        """End the command and the hub, and return when all processes have ended."""
        self._process.interrupt()
        if self._hub is not None:
            self._hub.close()
        self._process.stop(is_interrupted=True)

    def finish(self) -> bool:
        """Return whether the ended command has completed its work; False if it was stopped.

        Raises:
            UserError: with the line that the command printed, or for a function that failed, from
                its error.
            RlearnerError: if the command has failed otherwise.
        """
        if self._hub is not None:
            self._hub.close()
        try:
            is_complete = self._process.read_outcome()
        finally:
            if self._failure is not None:
                name, error = self._failure
                # The words of ours that say why there is no score need no type.
                reason = str(error) if isinstance(error, NoScore) else fault.told(error)
                text = f"{name}: {reason}"
                if not name:
                    text = f"the hub of the reward functions failed: {described(error)}"
                raise UserError(text) from error
        return is_complete

    def _report_failure(self, name: str, error: BaseException) -> None:
        # Without its broker, at the run's end, the hub may fail.
        if self._failure is None and (name or self.is_running):
            self._failure = (name, error)
            self._process.interrupt()
