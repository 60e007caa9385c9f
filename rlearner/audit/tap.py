"""An independent record of a run's tickets and samples as they cross the wire.

    python -m rlearner.audit.tap --broker URL --run RUN --out FILE

It uses plain subscriptions of nats-py and decodes MessagePack without this project's code, so
``rlearner audit RUN --tap FILE`` can check the learner's ledger against it. It sees every attempt
to publish, and writes one numbered JSON line per message and per interruption. A server that is cut
off from its cluster forwards nothing and does not report it; a test that cuts it off sends SIGUSR1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import struct
import time
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import nats
from nats.aio.msg import Msg

from broker.contract.streams import SAMPLES, TICKETS
from broker.errors import described
from broker.identity.login import client_options


class TapFile:
    """Appends events to a file, each line at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._number = 0

    def write(self, event: str, **values: Any) -> None:
        if self._file.closed:
            return  # the disconnect callback of our own close
        self._number += 1
        self._file.write(
            json.dumps({"n": self._number, "event": event, "time": time.time(), **values}) + "\n"
        )
        # A test may kill the tap; every line written so far must count.
        self._file.flush()

    async def ticket(self, message: Msg) -> None:
        self.note_ticket(message)

    async def sample(self, message: Msg) -> None:
        self.note_sample(message)

    def note_ticket(self, message: Msg) -> None:
        body = _decode_message(message.data, _Ticket) or _Ticket()
        content = {
            name: getattr(body, name) for name in ("domain", "task_index", "seed", "min_version")
        }
        self.write("ticket", ticket=body.number, **content, **_describe_message(message))

    def note_sample(self, message: Msg) -> None:
        body = _decode_message(message.data, _Sample) or _Sample()
        versions = [
            version
            for trajectory in body.trajectories
            for version in _token_versions(trajectory.version_runs.data)
        ]
        bounds: dict[str, int] = {}
        if versions:
            bounds = {"oldest": min(versions), "newest": max(versions)}
        ticket = body.ticket or _parse_number((message.headers or {}).get("Rl-Ticket", ""))
        self.write(
            "sample",
            ticket=ticket,
            kind=body.type,
            reason=body.reason,
            **bounds,
            **_describe_message(message),
        )

    def close(self) -> None:
        self.write("close")
        self._file.close()


class _Ticket(msgspec.Struct):
    """The recorded part of a ticket."""

    number: int = 0
    domain: str = ""
    task_index: int = -1
    seed: int = -1
    min_version: int = -1


class _Column(msgspec.Struct):
    data: bytes


class _Trajectory(msgspec.Struct):
    version_runs: _Column


class _Sample(msgspec.Struct):
    """The recorded part of a sample."""

    type: str = "malformed"
    ticket: int = 0
    reason: str = ""
    trajectories: list[_Trajectory] = []


S = TypeVar("S", _Ticket, _Sample)


def _decode_message(data: bytes, kind: type[S]) -> S | None:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _token_versions(data: bytes) -> list[int]:
    """Return the tokens' policy versions, from little-endian pairs (version, number of tokens)."""
    return [
        version
        for version, num_tokens in struct.iter_unpack("<ii", data[: len(data) // 8 * 8])
        if num_tokens > 0
    ]


def _parse_number(text: str) -> int:
    # Up to 18 digits: any text may stand in the header, and a ticket is an int64.
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else 0


def _describe_message(message: Msg) -> dict[str, Any]:
    digest = blake2b(message.data, digest_size=8).hexdigest()
    return {
        "digest": digest,
        "id": (message.headers or {}).get("Nats-Msg-Id", ""),
        "bytes": len(message.data),
    }


async def record_messages(
    url: str, run: str, out: Path, stop: asyncio.Event, ready: asyncio.Event | None = None
) -> None:
    """Append messages to ``out`` until ``stop``; set ``ready`` once none can be missed any more."""
    recorder = TapFile(out)

    async def disconnected() -> None:
        recorder.write("disconnected")

    async def reconnected() -> None:
        recorder.write("reconnected")

    async def failed(error: Exception) -> None:
        recorder.write("error", reason=described(error))

    # The client does not notice that its server is cut off, so the test reports it.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, recorder.write, "cut")
    client = await nats.connect(
        url.split(","),
        **client_options(url),
        name="tap",
        max_reconnect_attempts=-1,
        reconnect_time_wait=0.1,
        disconnected_cb=disconnected,
        reconnected_cb=reconnected,
        error_cb=failed,
    )
    subscribed = []
    try:
        for stream, handle in ((TICKETS, recorder.ticket), (SAMPLES, recorder.sample)):
            subjects = stream.all_subjects(run)
            # No limit on pending messages: a dropped one would look like a lost one.
            subscription = await client.subscribe(
                subjects, cb=handle, pending_msgs_limit=-1, pending_bytes_limit=-1
            )
            subscribed.append(subscription)
        await client.flush()
        recorder.write("open", run=run, broker=url)
        if ready is not None:
            ready.set()
        await stop.wait()
        await client.flush()
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
        for subscription in subscribed:
            await subscription.drain()  # type: ignore[no-untyped-call]
        recorder.close()
        await client.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGINT or SIGTERM."""
    text = "Record a run's tickets and samples on the wire."
    parser = argparse.ArgumentParser(prog="python -m rlearner.audit.tap", description=text)
    parser.add_argument("--broker", required=True, metavar="URL")
    parser.add_argument("--run", required=True, metavar="NAME")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE")
    options = parser.parse_args(argv)

    async def body() -> None:
        stop = asyncio.Event()
        ready = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        listening = asyncio.create_task(
            record_messages(options.broker, options.run, options.out, stop, ready)
        )
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([listening, waiting], return_when=asyncio.FIRST_COMPLETED)
        if ready.is_set():
            print("ready", flush=True)
        waiting.cancel()
        await listening

    asyncio.run(body())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
