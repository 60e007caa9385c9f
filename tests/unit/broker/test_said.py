"""The newest warning of a process, as its presence tells it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from broker.system.recent_warning import FOR_S, MAX_CHARS, RecentWarning, forget_warning


@pytest.fixture
def said() -> Iterator[RecentWarning]:
    handler = RecentWarning()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_the_newest_warning_or_error_for_ten_minutes(said: RecentWarning) -> None:
    log = logging.getLogger("some.module")
    log.info("all is well")
    assert said.line(0.0) == ""
    log.warning("disk %s\nfull", "nearly")
    log.error("no %s", "model")
    record_time = said._newest[0] if said._newest else 0.0
    line = said.line(record_time)
    assert line[10] == " "
    assert line[19:] == " ERROR no model"
    assert said.line(record_time + FOR_S) == line
    assert said.line(record_time + FOR_S + 1) == ""


def warning(text: str) -> logging.LogRecord:
    """Goes to no other handler: a parallel test run cannot pass half a character on."""
    return logging.makeLogRecord(
        {"msg": text, "levelno": logging.WARNING, "levelname": "WARNING", "created": 0.0}
    )


def test_it_fits_and_can_be_encoded(said: RecentWarning) -> None:
    said.handle(warning("x" * 1000 + "\ud800"))
    assert len(said.line(0.0)) == MAX_CHARS
    said.handle(warning("\ud800 two\n lines"))
    said.line(0.0).encode()
    assert said.line(0.0).endswith("WARNING ? two lines")


def test_recovery_ends_the_warning_of_its_own_logger(said: RecentWarning) -> None:
    connection = logging.getLogger("some.connection")
    disk = logging.getLogger("some.disk")
    connection.warning("no broker")
    now = said._newest[0] if said._newest else 0.0
    forget_warning(disk)
    assert said.line(now).endswith("WARNING no broker")
    forget_warning(connection)
    assert said.line(now) == ""
