"""Logging to stderr, and to a file on request, as lines of text or as one JSON object per line."""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import sys
from typing import Any, Final, TextIO

from broker.errors import UserError
from broker.system import journal
from broker.system.log_rotation import PrivateLogFile, rotate_output
from broker.system.redaction import HIDDEN, is_secret_name, redact
from broker.system.visible_text import visible, visible_json

log = logging.getLogger(__name__)
_identity = {"run": "-", "role": "-", "id": "-"}
TRACEBACK: Final = "traceback"  # the key in ``extra``
# environment variable: default of --log-format, which children inherit
FORMAT: Final = "RL_LOG_FORMAT"
FORMATS: Final = ("text", "json")
ERROR_PREFIX: Final = "error: "
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LineFormatter(logging.Formatter):
    """``2026-11-22 12:00:01.042 INFO run role id message key=value``, tracebacks below.

    Secrets appear as ``***``.
    """

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__(datefmt=None)
        self.default_time_format = "%Y-%m-%d %H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        return redact(visible(super().format(record), newlines=True))

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        below = fields.pop(TRACEBACK, "")
        extras = [visible(f"{key}={value}") for key, value in fields.items()]
        message = " ".join(record.getMessage().splitlines())
        line = " ".join([*self.start(record), message, *extras])
        return f"{line}\n{below}" if below else line

    def start(self, record: logging.LogRecord) -> list[str]:
        """Return the words before the message."""
        return [self.formatTime(record), record.levelname, *_identity.values()]


class JournalFormatter(LineFormatter):
    """The message and what follows it; the rest is in the entry's fields."""

    def start(self, record: logging.LogRecord) -> list[str]:
        """Return the words before the message: none."""
        return []


class JsonFormatter(logging.Formatter):
    """One object per record: time, level, run, role, id, message, extra, traceback.

    The time is UTC in ISO 8601 with milliseconds. ``extra`` and ``traceback`` are absent without
    content. Secrets appear as ``***``.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        trace = fields.pop(TRACEBACK, "")
        if (
            record.exc_info
            and not isinstance(record.exc_info, bool)
            and record.exc_info[0] is not None
        ):
            trace = trace or self.formatException(record.exc_info)
        if record.stack_info:
            trace = "\n".join(filter(None, (trace, record.stack_info)))
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            **_identity,
            "message": redact(record.getMessage()),
            **(
                {"extra": {key: _plain_value(key, value) for key, value in fields.items()}}
                if fields
                else {}
            ),
            **({TRACEBACK: redact(trace)} if trace else {}),
        }
        return visible_json(line)


def _plain_value(key: str, value: Any) -> Any:
    """Return a value of ``extra`` for JSON, redacted first: encoding hides a secret's quotes."""
    if is_secret_name(key):
        return HIDDEN
    if value is None or isinstance(value, bool | int | float):
        return (
            value if value == value and value not in (float("inf"), float("-inf")) else str(value)
        )
    return redact(str(value))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the stderr of the moment: a library may log after the first one was closed."""

    def __init__(self) -> None:
        # StreamHandler's would keep the stream.
        logging.Handler.__init__(self)

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        rotate_output()

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        """The present stderr."""
        return sys.stderr


def configure(level: str = "INFO") -> None:
    """Send this process's logging to stderr in one format, or to the journal behind it."""
    handler: logging.Handler = StderrHandler()
    if journal.is_behind_stderr():
        handler.setFormatter(LineFormatter())
        handler = journal.JournalHandler(lambda: _identity, handler)
    _set_format(handler, os.environ.get(FORMAT, ""))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(True)


def _set_format(handler: logging.Handler, form: str) -> None:
    text = JournalFormatter if isinstance(handler, journal.JournalHandler) else LineFormatter
    handler.setFormatter(JsonFormatter() if form == "json" else text())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --log-level, --log-format and --log-file."""
    levels = ["DEBUG", "INFO", "WARNING", "ERROR"]
    default = form if (form := os.environ.get(FORMAT)) in FORMATS else FORMATS[0]
    text = f"lines of text, or one JSON object per line ({FORMAT}, %(default)s)"
    parser.add_argument("--log-format", default=default, choices=FORMATS, help=text)
    parser.add_argument(
        "--log-level", default="INFO", choices=levels, help="lowest level logged (%(default)s)"
    )
    parser.add_argument(
        "--log-file", metavar="PATH", help="also append the log to this file in an existing folder"
    )


def apply(options: argparse.Namespace) -> None:
    """Apply the options.

    Raises:
        UserError: if the file cannot be written.
    """
    root = logging.getLogger()
    root.setLevel(options.log_level)
    # For the processes that this one starts.
    os.environ[FORMAT] = options.log_format
    for existing in root.handlers:
        if isinstance(existing, StderrHandler | journal.JournalHandler):
            _set_format(existing, options.log_format)
    if not options.log_file:
        return
    try:
        handler = PrivateLogFile(options.log_file)
    except OSError as error:
        reason = f"{error.strerror}; name a file in a folder that exists"
        raise UserError(f"--log-file: cannot write {options.log_file}: {reason}") from None
    _set_format(handler, options.log_format)
    root.addHandler(handler)


def say_error(text: str) -> None:
    """Print ``error: …`` to stderr, in the log's format if that is JSON, and log it to the log file
    if there is one.
    """
    plain = f"{ERROR_PREFIX}{redact(visible(text, newlines=True))}"
    is_json = os.environ.get(FORMAT) == "json"
    record = _error_record(f"{ERROR_PREFIX}%s", text)
    # By stderr even to the journal, which cannot tell the unit of a record whose process has ended.
    level = journal.ERROR_LEVEL if journal.is_behind_stderr() else ""
    print(f"{level}{JsonFormatter().format(record) if is_json else plain}", file=sys.stderr)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(_error_record("%s", text))


def _error_record(message: str, text: str) -> logging.LogRecord:
    return log.makeRecord(
        log.name, logging.ERROR, __file__, lno=0, msg=message, args=(text,), exc_info=None
    )


def error_of(line: str) -> str:
    """Return the text behind ``error:`` in a line of ``say_error``, else empty."""
    if line.startswith("{"):
        try:
            line = str(json.loads(line).get("message", ""))
        except (ValueError, AttributeError):
            return ""
    return line.removeprefix(ERROR_PREFIX) if line.startswith(ERROR_PREFIX) else ""


def identify(
    *, run: str | None = None, role: str | None = None, process_id: str | None = None
) -> None:
    """Set the fields that every line starts with; None keeps a field."""
    values = {"run": run, "role": role, "id": process_id}
    _identity.update({key: value for key, value in values.items() if value})


def identity() -> dict[str, str]:
    """Return the process's run, role and id, each ``-`` while unknown."""
    return dict(_identity)
