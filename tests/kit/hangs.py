"""Pytest plugin: a test that outlives its time limit takes its process along, with the stacks of
all threads.

pytest-timeout raises in the main thread, once. Where that is a callback or a task in the
background, the event loop notes the exception and goes on, the test waits for ever, and the session
with it. pytest-xdist reports the test whose worker ended as failed, and starts another worker for
the rest.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import Any, Final

import pytest

GRACE_S = 60.0  # for the test to end on pytest-timeout's exception, with its fixtures
_STDERR: Final = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # not captured yet


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Generator[None, Any, Any]:
    faulthandler.dump_traceback_later(
        settings.timeout + GRACE_S, exit=True, file=item.config.stash[_STDERR]
    )
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer() -> Generator[None, Any, Any]:
    faulthandler.cancel_dump_traceback_later()
    return (yield)
