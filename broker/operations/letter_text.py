"""Renders the message in a dead letter as text: its fields, and its episodes turn by turn."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from broker.contract import codec, wire
from broker.contract.streams import RUNS
from broker.errors import WireError
from broker.jetstream.bus import Bus
from broker.settings.registry import resolve
from broker.system.visible_text import visible

SHOWN_BYTES: Final = 512
# Takes the configuration and the model of a run; returns what turns tokens into text, and a note.
DECODERS: Final = {"run": "learner.reporting.transcripts:run_decoder"}

# Turns token ids into text.
Decoder = Callable[[Sequence[int]], str]


async def find_decoder(bus: Bus) -> tuple[Decoder, str]:
    """Return the run's decoder and an empty note, or one that shows numbers and the reason.

    Reads files.
    """
    entry = await bus.key_value(RUNS).get(bus.run)
    if entry is None or not isinstance(entry[0], wire.RunSpec):
        return as_numbers, "tokens are shown by their numbers: the broker has no RunSpec of the run"
    make_decoder = await asyncio.to_thread(resolve, "decoders", "run", DECODERS)
    decoder: tuple[Decoder, str] = await asyncio.to_thread(make_decoder, entry[0])
    return decoder


def as_numbers(ids: Sequence[int]) -> str:
    """Return token ids as text."""
    return " ".join(map(str, ids))


def has_tokens(data: bytes | bytearray) -> bool:
    """Return whether these bytes are a message with tokens."""
    try:
        return isinstance(codec.decode(data, *wire.MESSAGES), wire.Group)
    except WireError:
        return False


def content_lines(data: bytes | bytearray, decode: Decoder = as_numbers) -> list[str]:
    """Return the content of a dead letter; the beginning of what is no message.

    Control characters are visible.
    """
    try:
        message = codec.decode(data, *wire.MESSAGES)
    except WireError as error:
        lines = [f"not a message: {error}", _beginning(data)]
    else:
        lines = list(_message_lines(message, decode))
    return [visible(line) for line in lines]


def _beginning(data: bytes | bytearray) -> str:
    try:
        value = msgspec.msgpack.decode(data)
        return json.dumps(value, ensure_ascii=False, default=_describe_bytes)[:SHOWN_BYTES]
    except (msgspec.DecodeError, ValueError, TypeError):
        text = f"bytes: {data[:SHOWN_BYTES].hex(' ')}"
        return text + " …" * (len(data) > SHOWN_BYTES)


def _describe_bytes(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _message_lines(message: msgspec.Struct, decode: Decoder) -> Iterator[str]:
    yield f"{'message':9} {type(message).__name__}"
    trajectories: list[wire.Trajectory] = []
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, list) and value and isinstance(value[0], wire.Trajectory):
            trajectories = value
        elif isinstance(value, str) and name in ("prompt", "reference"):
            yield from _text_lines(name, value)
        elif value not in ("", [], {}, None):
            yield f"{name:9} {_plain(value)}"
    for trajectory in trajectories:
        yield from _trajectory_lines(trajectory, decode)


def _plain(value: Any) -> str:
    """Return a value of a field as text, without bytes."""
    if isinstance(value, str):
        return value
    builtins = msgspec.to_builtins(value, builtin_types=(bytes,))
    return json.dumps(builtins, ensure_ascii=False, default=lambda data: f"{len(data)} bytes")


def _trajectory_lines(trajectory: wire.Trajectory, decode: Decoder) -> Iterator[str]:
    """Yield outcome, prompt and answers; what the environment said stands between answers."""
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.reward_parts.items())
    solved = "solved" if trajectory.success else "not solved"
    yield f"episode {trajectory.episode}: {solved}, reward {trajectory.reward:g}{parts}; " + (
        f"{trajectory.end} after {len(trajectory.turns)} turns"
    )
    ids = trajectory.token_ids.array().tolist()
    position = 0
    titles = ("prompt", "seen")
    for number, turn in enumerate(trajectory.turns, start=1):
        if position < turn.start:
            yield from _text_lines(titles[position > 0], decode(ids[position : turn.start]))
        text = decode(ids[turn.start : turn.end])
        yield from _text_lines(f"answer {number}, {turn.finish_reason}", text)
        position = turn.end
    if position < len(ids):
        yield from _text_lines(titles[position > 0], decode(ids[position:]))


def _text_lines(title: str, text: str) -> Iterator[str]:
    if text:
        yield f"  {title}"
        yield from (f"    | {line}" for line in text.split("\n"))
