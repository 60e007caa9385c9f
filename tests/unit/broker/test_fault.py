"""What a user's code raised, as the hubs tell it."""

import asyncio
import importlib.util
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.system.fault import MAX_TRACE_CHARS, TracebackLog, place, told, trace
from broker.system.logs import LineFormatter

CODE = """\
import asyncio
import json


def raises(row):
    return row["no such column"]


def through_a_library(text):
    return json.loads(text)


def through_itself(row):
    return raises(row)


async def asynchronous(row):
    await asyncio.sleep(0)
    return raises(row)


def deep(n):
    return deep(n + 1)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def mute(_):
    raise Mute
"""


@pytest.fixture
def users(tmp_path: Path) -> Any:
    (tmp_path / "bad_rewards.py").write_text(CODE)
    spec = importlib.util.spec_from_file_location("bad_rewards", tmp_path / "bad_rewards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def caught(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda users: users.raises({}), "KeyError: 'no such column' (bad_rewards.py:6 in raises)"),
        (
            lambda users: users.through_itself({}),
            "KeyError: 'no such column' (bad_rewards.py:6 in raises)",
        ),
        (
            lambda users: asyncio.run(users.asynchronous({})),
            "KeyError: 'no such column' (bad_rewards.py:6 in raises)",
        ),
        (
            lambda users: users.mute(0),
            "Mute: (and cannot say what, RuntimeError) (bad_rewards.py:32 in mute)",
        ),
    ],
)
def test_the_line_of_the_users_file_is_named(
    users: Any, call: Callable[[Any], Any], expected: str
) -> None:
    assert told(caught(lambda: call(users))) == expected


def test_a_library_that_raises_was_called_from_somewhere(users: Any) -> None:
    error = caught(lambda: users.through_a_library("{"))
    assert isinstance(error, json.JSONDecodeError)
    assert place(error) == "bad_rewards.py:10 in through_a_library"


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("<ipython-input-3-0a1b>", "<ipython-input-3-0a1b>:2 in typed"),
        ("<stdin>", "<stdin>:2 in typed"),
        ("<frozen importlib>", ""),
    ],
)
def test_what_users_type_has_a_place(file: str, where: str) -> None:
    names: dict[str, Any] = {}
    exec(compile("def typed():\n    return {}['x']", file, "exec"), names)
    # The frame of this test would be the user's otherwise.
    error = caught(names["typed"])
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_name != "typed":
        error.__traceback__ = error.__traceback__.tb_next
    assert place(error) == where


def test_what_came_from_no_code_of_the_users_has_no_place() -> None:
    assert told(ValueError("never raised")) == "ValueError: never raised"


def test_a_long_traceback_is_cut_in_its_middle(users: Any) -> None:
    def wide(n: int) -> None:
        raise ValueError("x" * 20_000)

    text = trace(caught(lambda: wide(0)))
    assert text.startswith("Traceback (most recent call last):")
    assert "characters left out" in text
    assert len(text) < MAX_TRACE_CHARS + 100
    assert len(trace(caught(lambda: users.deep(0)))) < MAX_TRACE_CHARS + 100


def test_a_traceback_is_logged_once_for_each_place(
    users: Any, caplog: pytest.LogCaptureFixture
) -> None:
    log, traces = logging.getLogger("test"), TracebackLog()
    for key in ("a", "b"):
        traces.say(log, f"ticket {key}", trace(caught(lambda: users.raises({}))))
    traces.say(log, "ticket c", trace(caught(lambda: users.mute(0))))
    traces.say(log, "ticket d", "")
    lines = [LineFormatter().format(record) for record in caplog.records]
    assert [line.partition("\n")[0].partition("ticket ")[2] for line in lines] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert ["Traceback" in line for line in lines] == [True, False, True, False]
    assert 'bad_rewards.py", line 6, in raises' in lines[0]
    assert lines[0].endswith("\nKeyError: 'no such column'")
