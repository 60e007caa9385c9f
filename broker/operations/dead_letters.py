"""``broker dead``: lists, shows, retries and purges dead letters, messages that no process could
use.
"""

from __future__ import annotations

import argparse
import sys
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from broker.contract import codec, wire
from broker.contract.streams import DEAD
from broker.errors import UserError, WireError
from broker.jetstream.bus import Bus, LogRecord
from broker.operations import dead_letter_retry, letter_text
from broker.operations.runs import choose_run
from broker.system.visible_text import visible, visible_json


async def stored_letters(bus: Bus, newest: int | None = None) -> AsyncGenerator[LogRecord, None]:
    """Yield every dead letter that exists now, or only the newest ones."""
    last = await bus.last_seq(DEAD)
    if await bus.first_seq(DEAD) > last:
        return
    async with aclosing(
        bus.read_log(DEAD, 1 if newest is None else max(1, last - newest + 1))
    ) as records:
        async for record in records:
            yield record
            if record.seq >= last:
                return


async def list_letters(bus: Bus, options: argparse.Namespace) -> None:
    """``broker dead list``: print a line for each, and the count to standard error."""
    await choose_run(bus, options.run)
    if options.json:
        print(
            visible_json(
                {
                    "run": bus.run,
                    "letters": [_summary(record) async for record in stored_letters(bus)],
                }
            )
        )
        return
    count = 0
    async for record in stored_letters(bus):
        count += 1
        letter = record.message
        if isinstance(letter, wire.DeadLetter):
            origin = f"{letter.stream} {letter.sequence}" if letter.sequence else letter.stream
            ticket = f", ticket {letter.ticket}" if letter.ticket else ""
            print(
                visible(
                    f"{record.seq}  {origin}{ticket}, {len(letter.data)} bytes, "
                    f"by {letter.by}: {letter.reason}"
                )
            )
        else:
            print(visible(f"{record.seq}  does not decode: {record.error}"))
    print(f"{count} dead letter{'' if count == 1 else 's'} in run {bus.run}", file=sys.stderr)


def _summary(record: LogRecord) -> dict[str, Any]:
    """Return what is known of a letter without its bytes."""
    letter = record.message
    if not isinstance(letter, wire.DeadLetter):
        return {"number": record.seq, "error": record.error, "bytes": len(record.data)}
    names = ("stream", "sequence", "ticket", "by", "reason")
    return {
        "number": record.seq,
        **{name: getattr(letter, name) for name in names},
        "bytes": len(letter.data),
    }


async def _letter(bus: Bus, number: int) -> LogRecord:
    """Return one dead letter.

    Raises:
        UserError: if it does not exist.
    """
    async for record in stored_letters(bus):
        if record.seq == number:
            return record
    raise UserError(f"no dead letter {number} in run {bus.run}")


async def show_letter(bus: Bus, options: argparse.Namespace) -> None:
    """``broker dead show N``: print one completely."""
    await choose_run(bus, options.run)
    record = await _letter(bus, options.number)
    if options.json:
        print(visible_json(_summary(record) | _contents(record)))
    else:
        await _show(bus, record, raw=options.raw)


async def retry_letter(bus: Bus, options: argparse.Namespace) -> None:
    """``broker dead retry N``: print each outcome as it arrives.

    Raises:
        UserError: if there is no such letter, or it cannot be retried.
    """
    await choose_run(bus, options.run)
    letter = (await _letter(bus, options.number)).message
    if not isinstance(letter, wire.DeadLetter):
        raise UserError(f"dead letter {options.number} does not decode, so it cannot be retried")
    if not options.json:
        print(
            visible(f"ticket {letter.ticket}, given up by {letter.by}: {letter.reason}"), flush=True
        )
    outcome_rows: list[dict[str, Any]] = []
    async with aclosing(dead_letter_retry.retry(bus, letter, options.timeout)) as outcomes:
        async for outcome in outcomes:
            outcome_rows.append(dead_letter_retry.as_plain(outcome))
            if options.json:
                continue
            print("\n".join(map(visible, dead_letter_retry.described(outcome))), flush=True)
    if options.json:
        print(
            visible_json(
                {
                    "ticket": letter.ticket,
                    "by": letter.by,
                    "reason": letter.reason,
                    "outcomes": outcome_rows,
                }
            )
        )
    print("for inspection only: the result is neither stored nor trained on", file=sys.stderr)


def _contents(record: LogRecord) -> dict[str, Any]:
    """Return the original message, decoded if it can be, else its bytes as base64."""
    letter = record.message
    data = letter.data if isinstance(letter, wire.DeadLetter) else record.data
    try:
        message = codec.decode(data, *wire.MESSAGES)
    except WireError:
        return {"data": b64encode(data).decode()}
    return {"type": type(message).__name__, "message": msgspec.to_builtins(message)}


async def _show(bus: Bus, record: LogRecord, *, raw: bool) -> None:
    letter = record.message
    data = letter.data if isinstance(letter, wire.DeadLetter) else record.data
    if raw:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    if isinstance(letter, wire.DeadLetter):
        for name in ("stream", "sequence", "ticket", "by", "reason"):
            print(visible(f"{name:9} {getattr(letter, name)}"))
    print(f"{'data':9} {len(data)} bytes")
    decode: letter_text.Decoder = letter_text.as_numbers
    if letter_text.has_tokens(data):
        decode, note = await letter_text.find_decoder(bus)
        if note:
            print(visible(f"{'tokens':9} {note}"))
    print("\n".join(letter_text.content_lines(data, decode)))


async def purge_letters(bus: Bus, options: argparse.Namespace) -> None:
    """``broker dead purge``: delete all, or those up to a number."""
    await choose_run(bus, options.run)
    count_at_start = (await bus.depth(DEAD))[""]
    last = await bus.last_seq(DEAD)
    await bus.trim(DEAD, (last if options.through is None else min(options.through, last)) + 1)
    deleted = count_at_start - (await bus.depth(DEAD))[""]
    text = f"{deleted} dead letters deleted from run {bus.run}"
    print(visible_json({"run": bus.run, "deleted": deleted}) if options.json else text)
