"""The outermost layer of every command: one line for bad input, quiet on a closed pipe."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from broker.errors import UserError
from broker.system import logs
from broker.system.private_files import private_umask

EXIT_DONE: Final = 0
EXIT_FAULT: Final = 1
EXIT_USER_ERROR: Final = 2
EXIT_STOPPED: Final = 130
# What a shell reports of other tools there: 128 + SIGPIPE.
EXIT_OUTPUT_CLOSED: Final = 141


class ExitCode(NamedTuple):
    """A code of the table in docs/commands.md.

    Attributes:
        meaning: why a process ends with it.
        commands: which ones do.
    """

    code: int
    meaning: str
    commands: str


EXIT_CODES: Final = (
    ExitCode(
        EXIT_DONE,
        "all steps are done, or the command succeeded",
        "all; also a hub, server or broker that was asked to stop",
    ),
    ExitCode(
        EXIT_FAULT,
        "an internal error (with a traceback), a broker that lost its store during work (one "
        "line), or differences found",
        "all; `doctor` if something is missing, `audit`, `replay`",
    ),
    ExitCode(
        EXIT_USER_ERROR,
        "the user must act: one line `error: …` on stderr says what is wrong and what is allowed",
        "all",
    ),
    ExitCode(
        EXIT_STOPPED,
        "stopped by the user before the last step, or before the command finished",
        "`rlearner start`, `up`, `eval`, `sft`, `dpo`, `distill`, `rm` and the operator's "
        "commands; every process at a second signal",
    ),
    ExitCode(
        EXIT_OUTPUT_CLOSED,
        "the reader of the output has gone, as in `rlearner status RUN | head -1`",
        "all",
    ),
)


def enter(command: Callable[[], int]) -> int:
    """Run a command and return its exit code; ``EXIT_CODES`` has the table.

    What the command and its children create is private to this user.

    SIGPIPE stays ignored: its default action would kill the process when a connection to the broker
    breaks.

    Raises:
        BrokenPipeError: if it comes from anything but stdout and stderr.
    """
    try:
        try:
            with private_umask():
                return command()
        except UserError as error:
            return refuse(error)
        except KeyboardInterrupt:
            return EXIT_STOPPED
        finally:
            if sys.stdout is not None:
                # The interpreter would do it at exit, and print a traceback.
                sys.stdout.flush()
    except BrokenPipeError:
        if not output_is_closed():
            raise
        devnull = os.open(os.devnull, os.O_WRONLY)
        for descriptor in filter(_has_no_reader, (1, 2)):
            # For what is still buffered.
            os.dup2(devnull, descriptor)
        os.close(devnull)
        return EXIT_OUTPUT_CLOSED


def refuse(error: UserError) -> int:
    """Print a user's error as one line and return the exit code."""
    logs.say_error(" ".join(str(error).split()))
    return EXIT_USER_ERROR


def output_is_closed() -> bool:
    """Return whether stdout or stderr is a pipe without a reader."""
    return any(map(_has_no_reader, (1, 2)))


def _has_no_reader(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
