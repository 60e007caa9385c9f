"""Messages that no process could use: why, by whom, their content; retry or delete."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

from nicegui.element import Element
from nicegui.events import GenericEventArguments

from broker.contract import wire
from broker.errors import UserError
from broker.jetstream.bus import LogRecord
from broker.operations.letter_text import as_numbers, content_lines, find_decoder, has_tokens
from broker.system.visible_text import visible
from rlearner.console import actions
from rlearner.console.components import Grid, banner, tag
from rlearner.console.pages.frame import Page, frame, perform
from rlearner.console.state import ConsoleRun, ConsoleState

COLUMNS: Final[list[dict[str, Any]]] = [
    {"key": "number", "title": "number", "n": True},
    {"key": "stream", "title": "stream"},
    {"key": "ticket", "title": "ticket", "n": True},
    {"key": "by", "title": "given up by"},
    {"key": "bytes", "title": "bytes", "n": True},
    {"key": "reason", "title": "reason", "wrap": True},
    {"key": "look", "title": "", "kind": "button", "sort": False},
]


async def dead_letters_page(state: ConsoleState, run: ConsoleRun) -> None:
    page = Page(state)
    records: dict[int, LogRecord] = {}
    problem = ""
    try:
        records = {
            record.seq: record for record in await actions.letters(await run.live.connected())
        }
    except UserError as error:
        problem = " ".join(str(error).split())
    with frame(state, "Dead letters", run, "dead-letters"):
        if problem:
            banner(problem, "bad")
        with tag("div", classes="head"):
            tag("h1", "Dead letters")
            count = tag("span", _describe_count(records), "dim")
        with tag("section", classes="panel"):
            grid = Grid("dead letters", COLUMNS, _letter_rows(records), empty="none")
        detail = tag("section", aria_live="polite")
        if state.actions and records:
            with tag("section", classes="panel"):
                tag("h2", "Delete")
                purged = tag("div", classes="mono", aria_live="polite")
                button = tag("button", "Delete…", "btn danger")

    async def look(event: GenericEventArguments) -> None:
        record = records.get(int(event.args["key"]))
        if record is not None:
            content = await _content_of(run, record)
            detail.clear()
            with detail:
                _letter_detail(page, state, run, record, content)

    async def again() -> None:
        records.clear()
        records.update(
            {record.seq: record for record in await actions.letters(await run.live.connected())}
        )
        grid.change(_letter_rows(records))
        count._text = _describe_count(records)
        count.update()

    async def purge() -> AsyncGenerator[str, None]:
        through = max(records, default=0)
        yield await actions.purge(await run.live.connected(), through, page.session)
        await again()

    grid.on("press", look)
    if state.actions and records:
        confirm(
            button,
            f"Delete all dead letters of run {run.name} up to number {max(records)}, also those "
            "not shown?",
        )
        button.on("confirmed", lambda: perform(purged, button, purge))
    page.until_gone(run.live.listen(lambda: None))


def confirm(button: Element, question: str) -> None:
    """Make a button ask before it emits ``confirmed``."""
    button._props["data-confirm"] = question


def _describe_count(records: dict[int, LogRecord]) -> str:
    return f"{len(records)}, the newest first"


def _letter_rows(records: dict[int, LogRecord]) -> list[dict[str, Any]]:
    rows = []
    for seq, record in records.items():
        letter = record.message
        row: dict[str, Any] = {
            "key": str(seq),
            "number": seq,
            "look": "show",
            "bytes": len(record.data),
        }
        if isinstance(letter, wire.DeadLetter):
            origin = f"{letter.stream} {letter.sequence}" if letter.sequence else letter.stream
            row |= {
                "stream": origin,
                "ticket": letter.ticket or None,
                "by": letter.by,
                "bytes": len(letter.data),
            }
            row["reason"] = visible(letter.reason)
        else:
            row |= {
                "stream": None,
                "ticket": None,
                "by": None,
                "reason": f"does not decode: {visible(record.error)}",
            }
        rows.append(row)
    return rows


async def _content_of(run: ConsoleRun, record: LogRecord) -> str:
    """Return the content of a dead letter as text."""
    letter = record.message
    data = letter.data if isinstance(letter, wire.DeadLetter) else record.data
    if not has_tokens(data):
        return "\n".join(content_lines(data))
    try:
        decode, note = await find_decoder(await run.live.connected())
    except UserError as error:
        decode, note = as_numbers, f"tokens are shown by their numbers: {error}"
    lines = await asyncio.to_thread(content_lines, data, decode)
    return "\n".join([note, *lines] if note else lines)


def _letter_detail(
    page: Page, state: ConsoleState, run: ConsoleRun, record: LogRecord, content: str
) -> None:
    letter = record.message
    with tag("div", classes="panel"):
        tag("h2", f"Dead letter {record.seq}")
        if isinstance(letter, wire.DeadLetter):
            tag(
                "pre",
                visible(letter.reason, newlines=True),
                "log",
                tabindex="0",
                aria_label="reason and traceback",
            )
            tag("p", f"{len(letter.data)} bytes:", "dim")
            tag("pre", content, "log", tabindex="0", aria_label="content")
        else:
            tag("pre", visible(record.error), "log")
        if not state.actions:
            tag("p", "Run it again: broker dead retry, or start the console with --actions.", "dim")
            return
        output = tag("div", classes="mono", aria_live="polite")
        button = tag(
            "button",
            "Run it again",
            "btn",
            title="for inspection; nothing of it is stored or trained on",
        )

        async def retry() -> AsyncGenerator[str, None]:
            async for line in actions.retry(await run.live.connected(), record, page.session):
                yield line

        button.on("click", lambda: perform(output, button, retry))
