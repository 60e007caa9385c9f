"""Where log lines go."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from broker.system import logs


def test_lines_go_to_what_is_stderr_now(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logs.configure()
    logging.getLogger("one").info("at\nfirst", extra={"step": 3})
    monkeypatch.setattr(sys, "stderr", second)
    assert first.getvalue().endswith(" at first step=3\n")
    first.close()
    logging.getLogger("one").warning("then")
    lines = second.getvalue().splitlines()
    assert len(lines) == 1
    assert " WARNING " in lines[0]
    assert lines[0].endswith(" then")
