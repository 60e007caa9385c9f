"""The recipes of CONTRIBUTING that need a broker: a stream and a request channel are a declaration
and one line.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from broker.channel import carriers
from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus

ROOT = Path(__file__).parents[2]
CHANNEL = """
from broker.channel.carriers import RequestChannel
from broker.channel.over_nats import NatsClient, NatsServer


class Counting(NatsClient):
    sent = 0

    async def send(self, address, token, data):
        self.sent += 1
        await super().send(address, token, data)


CHANNEL = RequestChannel(NatsServer, Counting)
"""
STREAM = [
    (
        "wire.py",
        "class RunSpec(Message",
        'class Note(Message, frozen=True, tag="Note"):\n    """Said in passing."""\n\n    text: str  # one line\n\n\n',
    ),
    ("wire.py", "    Ticket, EvalTicket, Group,", "    Note,\n"),
    ("examples.py", "        wire.Ticket(\n", '        wire.Note(text="x"),\n'),
    (
        "streams.py",
        "STREAMS: Final",
        'NOTES: Final = Stream("notes", StreamKind.LOG, (wire.Note,), "topic", "a", "b", "c")\n',
    ),
    ("streams.py", "        TICKETS,\n        EPISODES,", "        NOTES,\n"),
]
PROGRAM = """
import asyncio, sys
from broker import docs
from broker.contract import wire
from broker.contract.streams import NOTES
from broker.jetstream.bus import Bus

async def main():
    bus = await Bus.connect(sys.argv[1], sys.argv[2], name="recipe", deadline_s=60)
    await bus.ensure_streams()
    await bus.publish(NOTES, wire.Note(text="kept"), key="lake")
    async for entry in bus.read_log(NOTES, 1):
        print(entry.seq, entry.message.text)
        break
    await bus.delete_streams()
    await bus.close()

page = docs.render()
print(page.count("`rl.{run}.notes.{topic}`"), page.count("### Note"))
asyncio.run(main())
"""


def test_a_stream_is_a_declaration_and_one_line(
    tmp_path: Path, broker_url: str, run_name: str
) -> None:
    shutil.copytree(
        ROOT / "broker", tmp_path / "broker", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, before, text in STREAM:
        file = tmp_path / "broker" / "contract" / name
        source = file.read_text()
        assert source.count(before) >= 1, before
        file.write_text(source.replace(before, text + before, 1))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, broker_url, run_name],
        env={
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "PATH": "",
            "XDG_STATE_HOME": os.environ["XDG_STATE_HOME"],
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()) == (0, ["1 1", "1 kept"]), done.stderr


async def test_a_channel_is_a_file_and_one_line(
    bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "added_channel.py").write_text(CHANNEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="mine"):
        carriers.make_client("mine", bus)
    monkeypatch.setitem(carriers.CHANNELS, "mine", "added_channel:CHANNEL")
    server, client = carriers.make_server("mine", bus, "s1"), carriers.make_client("mine", bus)

    async def echo(request: wire.GenerateRequest) -> wire.GenerateReply:
        ids = request.token_ids.array()
        return wire.GenerateReply(
            request_id=request.request_id,
            token_ids=request.token_ids,
            logprobs=wire.column([-0.5] * len(ids), "<f4"),
            version_runs=wire.column([3, len(ids)], "<i4"),
            finish_reason="stop",
            server="s1",
            policy_version=3,
        )

    await server.start(echo, lambda request_id: None)
    try:
        request = wire.GenerateRequest(
            request_id="r1",
            conversation_id="c",
            token_ids=wire.column([4, 5], "<i4"),
            sampling=wire.SamplingParams(max_tokens=2),
        )
        reply = await client.generate(server.address, request, timeout_s=30)
    finally:
        await client.close()
        await server.close()
    assert reply.token_ids.array().tolist() == [4, 5]
    assert getattr(client, "sent") == 1  # noqa: B009 - a class of the added file
