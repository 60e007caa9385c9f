"""Pytest plugin for ``--reruns``, as .ci/run gives it: a test that fails and then passes is shown
with its failure, and is a fault to find.

Tests that kill real processes on a busy machine find races rarely. One such race in thousands of
tests does not stop a session, but it never goes unseen, and more than ``MAX_UNSTABLE`` of them fail
it.
"""

from __future__ import annotations

from typing import Final

import pytest
from _pytest.terminal import TerminalReporter
from skips import reporter_of

MAX_UNSTABLE: Final = 3


def unstable(reporter: TerminalReporter) -> list[pytest.TestReport]:
    """First failures of tests that were run again, whatever came of it."""
    return list(reporter.stats.get("rerun", []))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = reporter_of(session.config)
    if (
        reporter
        and len(unstable(reporter)) > MAX_UNSTABLE
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    found = unstable(terminalreporter)
    if found:
        terminalreporter.section("unstable: failed once", yellow=True)
    for report in found:
        terminalreporter.line(report.nodeid, yellow=True)
        report.toterminal(terminalreporter._tw)
    if len(found) > MAX_UNSTABLE:
        terminalreporter.line(
            f"{len(found)} unstable tests, more than {MAX_UNSTABLE}: the session fails", red=True
        )
