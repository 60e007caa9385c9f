"""Pytest plugin: skips tests of the sandbox where there is none, and ends with one line per reason
for skipping, with a count.

With RL_REQUIRE_SANDBOX=1, as .ci/run sets it, a session that did not exercise the sandbox fails.
"""

from __future__ import annotations

import functools
import os
from collections import Counter

import pytest
from _pytest.terminal import TerminalReporter

from rlearner_sandbox import NoSandbox, Sandbox

MARKER = "sandbox: runs programs under bubblewrap; skipped where that does not work"


@functools.cache
def lacking() -> str:
    """Why the sandbox does not work here and what to do about it, in one line; empty where it
    works.
    """
    try:
        Sandbox()
    except NoSandbox as error:
        return str(error)
    return ""


def required() -> bool:
    return os.environ.get("RL_REQUIRE_SANDBOX") == "1"


def reporter_of(config: pytest.Config) -> TerminalReporter | None:
    """None in a worker of xdist."""
    plugin = config.pluginmanager.get_plugin("terminalreporter")
    return (
        plugin
        if isinstance(plugin, TerminalReporter) and not hasattr(config, "workerinput")
        else None
    )


def exercised(reporter: TerminalReporter) -> bool:
    return any("sandbox" in report.keywords for report in reporter.stats.get("passed", []))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


def pytest_sessionstart() -> None:
    if required() and lacking():
        pytest.exit(f"RL_REQUIRE_SANDBOX=1: {lacking()}", returncode=1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sandbox") and lacking():
        pytest.skip(lacking())


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = reporter_of(session.config)
    if (
        required()
        and reporter
        and not exercised(reporter)
        and session.exitstatus == pytest.ExitCode.OK
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:5}  {reason}")
    if required() and not exercised(terminalreporter):
        terminalreporter.line("RL_REQUIRE_SANDBOX=1: no test of the sandbox passed", red=True)
