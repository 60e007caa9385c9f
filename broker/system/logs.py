"""Logging to stderr, and to a file on request: date, time, level, run, role, id, message, ``extra`` as key=value."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Final, TextIO

from broker.errors import UserError
from broker.system.log_rotation import PrivateLogFile, rotate_output
from broker.system.redaction import redact
from broker.system.visible_text import visible

log = logging.getLogger(__name__)
_identity = {"run": "-", "role": "-", "id": "-"}
TRACEBACK: Final = "traceback"  # the key in ``extra``
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """``2026-11-22 12:00:01.042 INFO run role id message key=value``, with a traceback on the lines below.

    Secrets appear as ``***``.
    """

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__(datefmt=None)
        self.default_time_format = "%Y-%m-%d %H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        return redact(visible(super().format(record), newlines=True))

    def formatMessage(self, record: logging.LogRecord) -> str:
        given = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        below = given.pop(TRACEBACK, "")
        extras = [visible(f"{key}={value}") for key, value in given.items()]
        message = " ".join(record.getMessage().splitlines())
        line = " ".join([self.formatTime(record), record.levelname, *_identity.values(), message, *extras])
        return f"{line}\n{below}" if below else line


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the stderr of the moment: a library may log after the first one was closed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's would keep the stream

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        rotate_output()

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present stderr."""
        return sys.stderr


def configure(level: str = "INFO") -> None:
    """Send all logging of this process to stderr, in one format."""
    handler = StderrHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --log-level and --log-file."""
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    parser.add_argument("--log-level", default="INFO", choices=levels, help="lowest level logged (%(default)s)")
    parser.add_argument("--log-file", metavar="PATH", help="also append the log to this file in an existing folder")


def apply(options: argparse.Namespace) -> None:
    """Apply the options.

    Raises:
        UserError: if the file cannot be written.
    """
    root = logging.getLogger()
    root.setLevel(options.log_level)
    if not options.log_file:
        return
    try:
        handler = PrivateLogFile(options.log_file)
    except OSError as error:
        why = f"{error.strerror}; name a file in a folder that exists"
        raise UserError(f"--log-file: cannot write {options.log_file}: {why}") from None
    handler.setFormatter(LineFormatter())
    root.addHandler(handler)


def say_error(text: str) -> None:
    """Print ``error: …`` to stderr, and log it to the log file if there is one."""
    print(f"error: {redact(visible(text, newlines=True))}", file=sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, text, (), None))


def identify(*, run: str | None = None, role: str | None = None, process_id: str | None = None) -> None:
    """Set the fields that every line starts with; None keeps a field."""
    given = {"run": run, "role": role, "id": process_id}
    _identity.update({key: value for key, value in given.items() if value})
