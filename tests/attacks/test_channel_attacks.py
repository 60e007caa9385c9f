"""What strangers and a compromised hub can try against a rollout server's request channel, judged
from outside.

The server is a process of its own. After each attempt another hub gets its answer in time, and the
server's memory has not grown by more than it may.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
from channel_kit import HubClient, ask, hub_client, raw_dealer
from raw_curve import RawCurve
from waits import LONG_S

from broker.channel import local_sockets
from broker.channel.bundle import pack
from broker.channel.zmq_address import ServerAddress, this_host
from broker.contract import wire
from broker.errors import RequestFailed
from broker.jetstream.bus import Bus
from rlearner_workers.patience import answer_within

KIT = Path(__file__).parents[1] / "kit"
NOBODY = 65534
MAY_GROW_MIB = 160.0
ATTACK_S = 4.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass
class Scene:
    """A server, a good hub, and what an attacker knows of the server: its presence."""

    bus: Bus
    process: subprocess.Popen[str]
    address: str
    good: HubClient
    numbers: int = 0

    @property
    def tcp(self) -> ServerAddress:
        return replace(ServerAddress.parse(self.address), local="")

    @property
    def place(self) -> tuple[str, int]:
        host, _, port = self.tcp.tcp.removeprefix("tcp://").rpartition(":")
        return host.strip("[]"), int(port)

    def mib(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / (1 << 20)

    async def assert_serving(self) -> None:
        """A hub that keeps to the rules gets an answer within seconds, on its old connection or a
        new one.
        """
        self.numbers += 1
        asking = self.good.generate(
            str(self.tcp), ask(f"good-{self.numbers}"), timeout_s=100 * LONG_S
        )
        # on its own clock: it may wait for a processor
        reply = await answer_within(asking, self.process.pid, LONG_S)
        assert reply.finish_reason == "length"
        assert reply.token_ids.array().tolist() == [1, 1, 1, 1]


@pytest.fixture
async def scene(bus: Bus, broker_url: str) -> AsyncIterator[Scene]:
    command = [sys.executable, str(KIT / "channel_server_child.py"), broker_url, bus.run]
    process = await asyncio.to_thread(subprocess.Popen, command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = (await asyncio.to_thread(process.stdout.readline)).strip()
    async with hub_client(bus, "good") as good:
        made = Scene(bus, process, address, good)
        await made.assert_serving()
        try:
            yield made
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def request(tokens: int = 3, count: int = 4, name: str = "evil", deadline_s: float = 60.0) -> bytes:
    """A request, encoded without any check."""
    fields = {
        "request_id": name,
        "deadline_s": deadline_s,
        "sampling": wire.SamplingParams(max_tokens=count),
    }
    return msgspec.msgpack.encode(msgspec.structs.replace(ask("x", tokens), **fields))


async def hear(dealer: zmq.Socket[bytes], within_s: float = 1.5) -> list[bytes]:
    """Everything that the server answers within a time."""
    heard: list[bytes] = []
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            heard += dealer.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            await asyncio.sleep(0.02)
    return heard


async def push(dealer: zmq.Socket[bytes], frame: bytes, seconds: float = ATTACK_S) -> int:
    """Send a frame as often as the server takes it; return how often."""
    sent, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            dealer.send(frame, zmq.DONTWAIT)
            sent += 1
        except zmq.Again:
            await asyncio.sleep(0.01)
        except zmq.ZMQError:
            break
        if sent % 64 == 0:
            await asyncio.sleep(0)
    return sent


# ------------------------------------------------------------------------------------- strangers on
# the network


async def test_a_stranger_asks_without_encryption(scene: Scene) -> None:
    async with raw_dealer(scene.tcp.tcp) as dealer:
        await asyncio.to_thread(dealer.send, pack([("1", request())]))
        assert await hear(dealer) == []
    await scene.assert_serving()


async def test_a_stranger_asks_with_a_key_of_its_own(scene: Scene) -> None:
    async with raw_dealer(scene.tcp.tcp, scene.tcp.key) as dealer:
        await asyncio.to_thread(dealer.send, pack([("1", request())]))
        assert await hear(dealer, 4.5) == []  # longer than the server waits for its presence
    await scene.assert_serving()


async def test_a_stranger_shows_a_hubs_key_without_its_secret(scene: Scene) -> None:
    _, secret = zmq.curve_keypair()
    async with raw_dealer(scene.tcp.tcp, scene.tcp.key, (scene.good.key, secret)) as dealer:
        await asyncio.to_thread(dealer.send, pack([("1", request())]))
        assert await hear(dealer) == []
    await scene.assert_serving()


@pytest.mark.parametrize(
    "opening",
    [b"", b"\xff", GREETING[:40], b"GET / HTTP/1.1\r\n\r\n"],
    ids=["silent", "byte", "half", "http"],
)
async def test_half_open_connections_do_not_keep_others_out(scene: Scene, opening: bytes) -> None:
    opened: list[socket.socket] = []
    try:
        for _ in range(600):
            with suppress(OSError):
                one = socket.create_connection(scene.place, timeout=1)
                opened.append(one)
                one.sendall(opening)
        assert len(opened) > 500
        async with hub_client(scene.bus, "late") as late:
            reply = await late.generate(str(scene.tcp), ask("late"), timeout_s=LONG_S)
            assert reply.finish_reason == "length"
    finally:
        for one in opened:
            one.close()
    await scene.assert_serving()


@pytest.mark.parametrize(
    "tail",
    [b"\x02" + (1 << 62).to_bytes(8, "big"), b"\x06" + (1 << 30).to_bytes(8, "big"), b"\xff" * 64],
    ids=["frame-of-exabytes", "command-of-a-gibibyte", "noise"],
)
async def test_an_announced_size_reserves_no_memory(scene: Scene, tail: bytes) -> None:
    before = scene.mib()

    def attack() -> None:
        for _ in range(8):
            with socket.create_connection(scene.place, timeout=2) as one, suppress(OSError):
                one.settimeout(1)
                one.sendall(GREETING + tail)
                for _ in range(64):
                    one.sendall(bytes(1 << 20))

    await asyncio.to_thread(attack)
    assert scene.mib() - before < MAY_GROW_MIB
    await scene.assert_serving()


# ---------------------------------------------------------------------------------------------- a
# compromised hub


Attack = Callable[[Scene, zmq.Socket[bytes]], Awaitable[None]]


async def as_hub(scene: Scene, attack: Attack) -> None:
    """Attack on a connection with a key that the server admits."""
    evil = HubClient(scene.bus, "evil")
    await evil.start()
    try:
        await evil.generate(str(scene.tcp), ask("first"), timeout_s=LONG_S)  # admitted
        async with raw_dealer(scene.tcp.tcp, scene.tcp.key, (evil.key, evil._secret)) as dealer:
            await asyncio.to_thread(dealer.send, pack([("1", request())]))
            # what the attacks below look for
            assert b"length" in await asyncio.to_thread(dealer.recv)
            await attack(scene, dealer)
    finally:
        await evil.leave()
        await evil.close()


@pytest.mark.parametrize(
    ("part", "count"),
    [pytest.param(1 << 20, 600, id="large-parts"), pytest.param(1, 200_000, id="many-parts")],
)
async def test_a_message_without_an_end_fills_no_memory(
    scene: Scene, part: int, count: int
) -> None:
    before = scene.mib()
    evil = HubClient(scene.bus, "evil")
    await evil.start()
    await evil.generate(str(scene.tcp), ask("first"), timeout_s=LONG_S)  # admitted

    def attack() -> int:
        with closing(RawCurve(scene.place, scene.tcp.key, evil.key, evil._secret)) as raw:
            for sent in range(count):
                try:
                    raw.send(bytes(part), more=True)
                except OSError:
                    return sent
        return count

    try:
        sent = await asyncio.to_thread(attack)
        # too large, the server cuts it off; this is not
        assert 0 < sent < 600 if part > 1 else sent == count
        # a small part takes up to 1.3 KiB while a busy machine has not read it
        most_mib = MAY_GROW_MIB if part > 1 else 2 * MAY_GROW_MIB
        assert scene.mib() - before < most_mib
    finally:
        await evil.leave()
        await evil.close()
    await scene.assert_serving()


async def test_requests_without_reading_the_replies_fill_no_memory(scene: Scene) -> None:
    before = scene.mib()

    async def attack(scene: Scene, dealer: zmq.Socket[bytes]) -> None:
        dealer.setsockopt(zmq.RCVHWM, 1)
        await push(dealer, pack([("1", request(count=100_000))]))
        assert scene.mib() - before < 2 * MAY_GROW_MIB

    await as_hub(scene, attack)
    await scene.assert_serving()


async def test_a_flood_of_requests_leaves_room_for_others(scene: Scene) -> None:
    before = scene.mib()

    async def attack(scene: Scene, dealer: zmq.Socket[bytes]) -> None:
        flood = asyncio.create_task(
            push(dealer, pack([(str(n), request(name=f"r{n}")) for n in range(200)]))
        )
        await asyncio.sleep(0.5)
        await scene.assert_serving()
        await flood
        assert scene.mib() - before < 2 * MAY_GROW_MIB

    await as_hub(scene, attack)
    await scene.assert_serving()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(lambda: pack([("1", request(deadline_s=1e300))]), id="deadline-of-1e300"),
        pytest.param(lambda: pack([("1", request(name="x" * 100_000))]), id="long-id"),
        pytest.param(lambda: b"\x91" * 500_000, id="deep-nesting"),
        pytest.param(lambda: pack([("1", b"")] * 50_000), id="many-empty-requests"),
        pytest.param(lambda: pack([("x" * 300, request())]), id="long-token"),
        pytest.param(lambda: secrets.token_bytes(1 << 20), id="noise"),
    ],
)
async def test_a_message_that_is_not_allowed_is_not_answered_with_tokens(
    scene: Scene, message: Callable[[], bytes]
) -> None:
    before = scene.mib()

    async def attack(scene: Scene, dealer: zmq.Socket[bytes]) -> None:
        await asyncio.to_thread(dealer.send, message())
        assert not any(b"length" in heard for heard in await hear(dealer))
        assert scene.mib() - before < MAY_GROW_MIB

    await as_hub(scene, attack)
    await scene.assert_serving()


async def test_a_hub_cannot_announce_a_server_that_takes_local_files(
    scene: Scene, tmp_path: Path
) -> None:
    """A forged presence makes no process connect to a socket of the forger's choice."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "trap"))
    listening.listen()
    listening.setblocking(False)
    for address in (
        f"ipc://{tmp_path}/trap",
        f"tcp://{tmp_path}/trap key={scene.tcp.key} host={this_host()}",
        "inproc://x",
    ):
        with pytest.raises(RequestFailed, match="is not a server address"):
            await scene.good.generate(address, ask("x"), timeout_s=2)
    with pytest.raises(BlockingIOError):
        listening.accept()
    listening.close()
    await scene.assert_serving()


async def test_a_loopback_address_of_another_host_is_not_used(scene: Scene) -> None:
    foreign = str(replace(scene.tcp, host="0" * 16))
    with pytest.raises(RequestFailed, match="is a loopback address of another host"):
        await scene.good.generate(foreign, ask("x"), timeout_s=2)
    await scene.assert_serving()


# ----------------------------------------------------------------------------------- another user
# of the same host

AS_NOBODY = """
import os, socket, sys
os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
{what}
print("succeeded")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("socket.socket(socket.AF_UNIX).connect({path!r})", id="connect"),
        pytest.param("os.listdir({folder!r})", id="list"),
        pytest.param("open({folder!r} + '/' + 'a' * 32, 'w')", id="create"),
        pytest.param("os.unlink({path!r})", id="delete"),
        pytest.param("os.rename({folder!r}, {folder!r} + '.old')", id="replace-the-folder"),
    ],
)
async def test_another_user_cannot_use_the_local_socket(scene: Scene, what: str) -> None:
    path = local_sockets.find_socket(ServerAddress.parse(scene.address).local)
    assert path
    program = AS_NOBODY.format(
        nobody=NOBODY, what=what.format(path=path, folder=str(Path(path).parent))
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "PermissionError" in done.stderr
    assert "succeeded" not in done.stdout
    assert local_sockets.find_socket(Path(path).name) == path
    reply = await scene.good.generate(scene.address, ask("local"), timeout_s=LONG_S)
    assert reply.finish_reason == "length"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("trap", ["owned-by-another", "open-to-others", "link"])
async def test_a_folder_that_another_user_prepared_is_not_used(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    prepared = runtime / "rlearner"
    if trap == "link":
        (tmp_path / "elsewhere").mkdir()
        prepared.symlink_to(tmp_path / "elsewhere")
    else:
        prepared.mkdir(mode=0o700)
        os.chown(prepared, *((NOBODY, NOBODY) if trap == "owned-by-another" else (0, 0)))
        prepared.chmod(0o777 if trap == "open-to-others" else 0o700)
    with pytest.raises(
        local_sockets.UnsafeFolder, match="must be a folder of this user's with mode 0700"
    ):
        local_sockets.path_of(local_sockets.new_name())
