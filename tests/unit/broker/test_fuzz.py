"""Every decoder against inputs that nobody would send: the documented error or a value, at once,
and without more memory than the input could be worth. ``RL_FUZZ=100000`` sets how many inputs there
are in all, ``RL_FUZZ_SEED`` which."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import fuzz_kit
import msgpack
import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from broker.channel.bundle import pack
from broker.channel.client import RequestClient
from broker.channel.endpoint import MAX_PENDING_DEAD_LETTERS
from broker.channel.over_zmq import ZmqServer
from broker.channel.zmq_address import ServerAddress
from broker.channel.zmq_client import ZmqClient
from broker.contract import checks, codec, sizes, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import SAMPLES, STREAMS
from broker.errors import RequestFailed, TransferFailed, UserError, WireError
from broker.jetstream import parts
from broker.jetstream.bus import LogRecord
from broker.jetstream.delivery import decode_message, number_of
from broker.settings.runspec import SECTIONS, validate
from broker.weights import plan as plans
from broker.weights.group import WaitMonitor
from broker.weights.protocol.session import parse_session
from broker.weights.store_messages import StoreMessages
from learner.backends.parts.part_file import PartFile
from learner.backends.parts.stored import StoredTensors
from learner.checkpoints import checkpoint
from learner.credit import archive, ledger_file, ledger_segments, record_intake
from learner.credit.ledger import Ledger
from learner.credit.ticket_rules import DomainRule, TicketRules
from rlearner.audit import tap

TOTAL = int(os.environ.get("RL_FUZZ", "4000"))
SEED = int(os.environ.get("RL_FUZZ_SEED", "0"))
SLOW_S = 2.0  # of processor time, which no input takes even while memory is traced
PATIENCE_S = 60 + TOTAL / 100
MEMORY = 2 * wire.MAX_PAYLOAD_BYTES  # beyond the input itself

replace = msgspec.structs.replace
GROUP = cast(wire.Group, EXAMPLES[wire.Group])
MESSAGES = [codec.encode(EXAMPLES[kind]) for kind in wire.MESSAGES]
RULES = TicketRules(
    steps=12,
    groups_per_step=1,
    max_staleness=1,
    on_late="wait",
    seed=0,
    domains=(DomainRule("lake", 1.0, 2, 2, 1.0),),
)


@dataclass
class Decoder:
    """One way in.

    Attributes:
        share: of the inputs.
        errors: what it may raise.
    """

    name: str
    call: Callable[[bytes], object]
    seeds: list[bytes]
    share: float
    errors: tuple[type[Exception], ...] = ()
    raised: int = field(default=0)


def round_trip(data: bytes) -> None:
    message: wire.Message = codec.decode(data, *wire.MESSAGES)
    assert codec.decode(codec.encode(message), type(message)) == message


def of_each_stream(data: bytes) -> None:
    """As readers of streams and buckets take them: the types of the row, and an error as a text."""
    for stream in (one for one in STREAMS if one.messages):
        message, problem = decode_message(data, stream.messages)
        assert (message is None) == bool(problem)
        assert "\n" not in problem


def put_together(data: bytes) -> None:
    """As the parts of a group: right in size and digest, whatever they hold."""
    if data:
        parted = wire.Parted(
            ticket=417,
            domain="lake",
            upload="u",
            size=len(data),
            part_bytes=sizes.PART_BYTES,
            digest=parts.hash_encoding(data),
        )
        checks.check(parted)
        assert parts.put_together(parted, bytearray(data), parted.digest).ticket == 417


def header(data: bytes) -> None:
    assert number_of({wire.TICKET_HEADER: data.decode("latin-1")}, wire.TICKET_HEADER, 0) >= 0


def taken_in(data: bytes) -> None:
    """As the learner takes a record of the log."""
    ledger = Ledger(RULES)
    ledger.open_credit()
    message, error = decode_message(data, SAMPLES.messages)
    ledger.apply(
        record_intake.read_record(LogRecord(1, message, error, 1, data), ledger, 100).record, 1
    )


def joined(data: bytes) -> None:
    """As whoever joins takes the run's settings."""
    spec = codec.decode(data, wire.RunSpec)
    validate({name: value for name, value in spec.config.items() if name in SECTIONS})


class Store:
    """A rendezvous store that holds one value."""

    def __init__(self, value: bytes) -> None:
        self.value = value

    def check(self, _: object) -> bool:
        return True

    def get(self, _: object) -> bytes:
        return self.value


def heard(data: bytes) -> None:
    assert (
        StoreMessages(cast(Any, Store(data)), "1-1.0", WaitMonitor()).heard("ready/1") is not None
    )


def planned(data: bytes) -> None:
    plan = plans.from_text(plans.decoded(data))
    assert plan.size_bytes > 0
    assert len(plan.digest) == 32


def session(data: bytes) -> None:
    name, uses = parse_session(data.decode("latin-1"))
    assert name
    assert uses >= 0


def frames_of(folder: Path) -> Callable[[bytes], None]:
    (folder / "samples").mkdir()

    def call(data: bytes) -> None:
        (folder / "samples" / "000000000001.frames").write_bytes(data)
        found = list(archive.read_frames(folder / "samples"))
        assert sum(len(frame.data) for frame in found) <= len(data)
        for frame in [*found, *archive.select_frames(folder / "samples", [1, 2])]:
            frame.record()
        archive.truncate_after(folder / "samples", 1)

    return call


def ledger_lines(folder: Path) -> Callable[[bytes], None]:
    (folder / ledger_segments.FOLDER).mkdir()

    def call(data: bytes) -> None:
        (folder / ledger_segments.FOLDER / "step-000000.jsonl").write_bytes(data)
        lines = ledger_segments.LedgerLines(folder / ledger_segments.FOLDER)
        ledger_file.LedgerLineBuilder(lines).summary(RULES)
        assert ledger_file.final_counts(lines)[0] or lines.problem

    return call


def checkpoint_of(folder: Path) -> Callable[[bytes], None]:
    own = folder / "step-000001" / "learner"
    own.mkdir(parents=True)

    def call(data: bytes) -> None:
        (own / "learner.json").write_bytes(data)
        Ledger.load(checkpoint.read_checkpoint(folder / "step-000001").ledger)

    return call


class Backend:
    """Takes any state."""

    def load_state(self, parts: Sequence[PartFile]) -> None:
        assert all(
            tensor.nbytes >= 0 for tensor in StoredTensors(part.path for part in parts).values()
        )


def state_of(folder: Path) -> Callable[[bytes], None]:
    own = folder / "step-000002" / "learner"
    own.mkdir(parents=True)
    made = checkpoint.Checkpoint(
        folder / "step-000002", 2, 1, {}, [PartFile(str(own / "state.safetensors"))]
    )

    def call(data: bytes) -> None:
        (own / "state.safetensors").write_bytes(data)
        checkpoint.load_state(made, cast(Any, Backend()))

    return call


def on_the_wire(folder: Path) -> Callable[[bytes], None]:
    class Message:
        headers = None

        def __init__(self, data: bytes) -> None:
            self.data = data

    def call(data: bytes) -> None:
        with contextlib.closing(tap.TapFile(folder / "tap.jsonl")) as recorder:
            recorder.note_ticket(cast(Any, Message(data)))
            recorder.note_sample(cast(Any, Message(data)))

    return call


def safetensors() -> bytes:
    body = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(body)) + body + bytes(8)


def frame(number: int, data: bytes) -> bytes:
    return (
        archive._HEADER.pack(
            archive.MAGIC, number, number, len(data), bytes.fromhex(ledger_file.digest_record(data))
        )
        + data
    )


def decoders(folder: Path) -> list[Decoder]:
    groups = [codec.encode(EXAMPLES[kind]) for kind in SAMPLES.messages]
    frames = [frame(1, groups[0]) + frame(2, groups[1]), frame(1, groups[1]) * 2, frame(1, b"")]
    ledger = Ledger(RULES)
    ledger.open_credit()
    held = ledger_file.LedgerLine(state="arrived", ticket=1, seq=1)
    summary = ledger_file.encode_lines(
        [ledger_file.LedgerLine(state="summary", held=(held,), reasons={"env_error": 2})]
    )
    lines = [
        summary + ledger_file.encode_lines([ledger_file.boundary_line(ledger)]) * 2,
        summary + b'{"state":"issued","ticket":1,"domain":"a"}\n',
    ]
    made = json.dumps({"format": 1, "step": 0, "epoch": 1, "ledger": ledger.dump()}).encode()
    plan = plans.make_plan(
        [plans.TensorSpec("a", (3, 4), "float32"), plans.TensorSpec("b", (), "int8")], 0.01
    )
    spec = codec.encode(EXAMPLES[wire.RunSpec])
    return [
        Decoder("messages", round_trip, MESSAGES, 0.26, (WireError,)),
        Decoder(
            "parts",
            put_together,
            [codec.encode(GROUP), codec.encode(EXAMPLES[wire.Parted])],
            0.04,
            (WireError,),
        ),
        Decoder("streams and buckets", of_each_stream, MESSAGES, 0.12),
        Decoder("header", header, [b"417", b"0", b"9" * 5000, "٣".encode()], 0.02),
        Decoder("samples into the ledger", taken_in, groups, 0.12),
        Decoder("settings of a run", joined, [spec], 0.04, (WireError, UserError)),
        Decoder(
            "weights: words", heard, [b"ok", b"digest of version 3: \xff"], 0.03, (TransferFailed,)
        ),
        Decoder("weights: plan", planned, [plan.text.encode()], 0.1, (WireError,)),
        Decoder("weights: session", session, [b"3-14.2", b"1-1.0"], 0.02, (WireError,)),
        Decoder("archive", frames_of(folder), frames, 0.07),
        Decoder("ledger file", ledger_lines(folder), lines, 0.06),
        Decoder("checkpoint: learner.json", checkpoint_of(folder), [made], 0.05, (UserError,)),
        Decoder(
            "checkpoint: state.safetensors", state_of(folder), [safetensors()], 0.03, (UserError,)
        ),
        Decoder("tap", on_the_wire(folder), MESSAGES, 0.04),
    ]


@pytest.mark.timeout(120 + TOTAL / 50)
def test_every_decoder_survives_what_nobody_would_send(tmp_path: Path) -> None:
    made = decoders(tmp_path)
    assert sum(decoder.share for decoder in made) == pytest.approx(1)
    for decoder in made:  # what is imported or built at the first call is no input's fault
        for seed in decoder.seeds:
            attempt(decoder, seed)
    slowest, most, count = 0.0, 0, 0
    tracemalloc.start()
    try:
        for decoder in made:
            rng = random.Random(f"{SEED} {decoder.name}")
            for data in itertools.islice(
                fuzz_kit.mutations(decoder.seeds, rng), round(TOTAL * decoder.share)
            ):
                tracemalloc.reset_peak()
                before, began = tracemalloc.get_traced_memory()[0], time.thread_time()
                attempt(decoder, data)
                took_s, used = (
                    time.thread_time() - began,
                    tracemalloc.get_traced_memory()[1] - before,
                )
                assert took_s < SLOW_S, f"{decoder.name}: {took_s:.1f} s for {data[:200]!r}"
                assert used <= MEMORY, f"{decoder.name}: {used} bytes for {data[:200]!r}"
                slowest, most, count = max(slowest, took_s), max(most, used), count + 1
    finally:
        tracemalloc.stop()
    refused = {decoder.name: decoder.raised for decoder in made}
    print(
        json.dumps(
            {
                "inputs": count,
                "slowest_s": round(slowest, 3),
                "most_bytes": most,
                "refused": refused,
            }
        )
    )


def dense(
    kind: type[wire.Message], path: list[Any], count: int, item: bytes, head: bytes = b"\xdd"
) -> bytes:
    """An example with so many of the same in one place; each counts one in a list, two in a
    mapping.
    """
    plain = msgpack.unpackb(codec.encode(EXAMPLES[kind]))
    inner, mark = plain, "here they stand"
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = mark
    before, _, after = msgpack.packb(plain).partition(msgpack.packb(mark))
    return bytes(before + head + struct.pack(">I", count) + item + after)


SHORT = [b"\xa4%04x\x00" % number for number in range(65_536)]
DENSE = [
    (wire.RunSpec, dense(wire.RunSpec, ["config", "x"], 190_000, b"\x80" * 190_000)),
    (wire.RunSpec, dense(wire.RunSpec, ["config", "x"], 190_000, b"\x90" * 190_000)),
    (wire.Metrics, dense(wire.Metrics, ["values"], 30_000, b"".join(SHORT[:30_000]), b"\xdf")),
    (wire.Group, dense(wire.Group, ["pools"], 1_000_000, b"\xa0" * 1_000_000)),
    (
        wire.Group,
        dense(wire.Group, ["trajectories", 0, "metrics"], 65_536, b"".join(SHORT), b"\xdf"),
    ),
    (wire.Group, dense(wire.Group, ["pools"], 8_000_000, b"\xa0" * 8_000_000)),
    (
        wire.GenerateRequest,
        dense(wire.GenerateRequest, ["sampling", "stop_token_ids"], 8_000_000, b"\x01" * 8_000_000),
    ),
    (wire.RunSpec, dense(wire.RunSpec, ["config", "x"], 8_000_000, b"\x90" * 8_000_000)),
]


@pytest.mark.parametrize(
    ("kind", "data"),
    DENSE,
    ids=lambda value: value.__name__ if isinstance(value, type) else len(value),
)
def test_a_message_as_dense_as_it_can_be_takes_no_more_memory(
    kind: type[wire.Message], data: bytes
) -> None:
    began = time.thread_time()
    with contextlib.suppress(WireError):
        codec.decode(data, kind)
    assert time.thread_time() - began < SLOW_S
    tracemalloc.start()  # costs several times the decoding itself
    try:
        with contextlib.suppress(WireError):
            codec.decode(data, kind)
        assert tracemalloc.get_traced_memory()[1] <= MEMORY
    finally:
        tracemalloc.stop()


def test_the_largest_group_passes() -> None:
    n = 900_000
    turn = replace(GROUP.trajectories[0].turns[0], start=0, end=n)
    columns = {
        "token_ids": ones(n, "<i4"),
        "loss_mask": ones(n, "|u1"),
        "logprobs": ones(n, "<f4", -1.0),
    }
    whole = replace(
        GROUP.trajectories[0], **columns, version_runs=wire.column([1, n], "<i4"), turns=[turn]
    )
    data = codec.encode(replace(GROUP, trajectories=[whole]))
    assert len(data) > 8_100_000
    tracemalloc.start()
    try:
        codec.decode(data, wire.Group)
        assert tracemalloc.get_traced_memory()[1] <= MEMORY
    finally:
        tracemalloc.stop()


def ones(n: int, dtype: Any, value: float = 1) -> wire.Column:
    return wire.column(np.full(n, value), dtype)


@pytest.mark.parametrize("many", [80_000, 80_001])
def test_values_are_counted_in_a_large_message(many: int) -> None:
    body = msgpack.packb(
        [
            b"x" * (1 << 20),
            {"a": [1, -1, 300, 1e9, "x" * 300, None], "b": True},
            msgpack.ExtType(3, b"abc"),
        ]
    )
    own = (
        1 + 1 + 1 + 2 + 1 + 6 + 1 + 1
        # the list, its bytes, the mapping, its keys, the list in it, that one's values, True, the
        # extension
    )
    data = msgpack.packb([0] * (many - own - 2)) + body
    assert not sizes.has_too_many_items(body)
    assert sizes.has_too_many_items(b"\x92" + data) == (many > 80_000)
    assert not sizes.has_too_many_items(b"\x92" + data[: -(1 << 20)])


@pytest.mark.timeout(120 + TOTAL / 50)
async def test_a_server_goes_on_whatever_frames_arrive() -> None:
    """Real sockets; what is no request goes to the dead letters, and a right one is answered all
    the same.
    """
    buried: list[bytes] = []
    enough, count = asyncio.Event(), TOTAL // 20

    class Bus:
        async def dead_letter(self, stream: object, *, data: bytes, **more: object) -> None:
            buried.append(data)
            if len(buried) >= MAX_PENDING_DEAD_LETTERS:  # of many at once, further ones leave none
                enough.set()

    async def handle(request: wire.GenerateRequest) -> wire.GenerateReply:
        return replace(
            cast(wire.GenerateReply, EXAMPLES[wire.GenerateReply]), request_id=request.request_id
        )

    server = ZmqServer(cast(Any, Bus()), "s", "")
    await server.start(handle, lambda request_id: None)
    client = ZmqClient(cast(Any, Bus()))
    rng = random.Random(f"{SEED} frames")
    inputs = fuzz_kit.mutations(
        [codec.encode(EXAMPLES[kind]) for kind in (wire.GenerateRequest, wire.AbortRequest)], rng
    )
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        path = ServerAddress.parse(server.address).endpoint()[0].removeprefix("ipc://")
        dealer.connect(f"ipc://{path}")
        for data in itertools.islice(inputs, count):
            right = pack([("1", data)])
            frames = rng.choice(
                (
                    [right],
                    [right],
                    [data],
                    [b"", right],
                    [right, right],
                    [pack([("x" * 300, data)])],
                    [rng.randbytes(300)],
                )
            )
            await dealer.send_multipart(frames)
        for data in itertools.islice(inputs, 20):  # no peer of ZeroMQ at all
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(rng.choice((b"", b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53))) + data)
            writer.close()
        reply = await client.generate(
            server.address,
            cast(wire.GenerateRequest, EXAMPLES[wire.GenerateRequest]),
            timeout_s=60 + TOTAL / 100,
        )
        assert reply.token_ids == cast(wire.GenerateReply, EXAMPLES[wire.GenerateReply]).token_ids
        async with asyncio.timeout(PATIENCE_S):
            await enough.wait()
    finally:
        dealer.close(0)
        context.term()
        await client.close()
        await server.close()


async def test_an_asker_goes_on_whatever_a_server_answers() -> None:
    class Bus:
        async def dead_letter(self, *_: object, **more: object) -> None: ...

    answers = fuzz_kit.mutations(
        [codec.encode(EXAMPLES[wire.GenerateReply])], random.Random(f"{SEED} answers")
    )

    class Carrier:
        def post(self, address: str, token: str, data: bytes, asker: object) -> bool:
            asked.answered(token, next(answers))
            return True

        async def send(self, *_: object) -> None: ...

    asked = RequestClient(cast(Any, Bus()), cast(Any, Carrier()))
    refused = 0
    for _ in range(TOTAL // 40):
        try:
            await asked.generate(
                "a", cast(wire.GenerateRequest, EXAMPLES[wire.GenerateRequest]), timeout_s=10
            )
        except RequestFailed:
            refused += 1
    assert refused > 0
    await asked.close()


def attempt(decoder: Decoder, data: bytes) -> None:
    said = ""
    try:
        decoder.call(data)
    except decoder.errors as error:
        decoder.raised += 1
        said = str(error)
    except Exception as error:
        raise AssertionError(
            f"{decoder.name}: {type(error).__name__}: {error} for {data[:300]!r}"
        ) from error
    assert "\n" not in said, f"{decoder.name}: {data[:200]!r}: {said}"
