"""A real nats-server on a small file system that is filled and freed while somebody publishes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.contract.streams import SAMPLES
from broker.contract.wire import Closed
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.server.server_supervisor import ServerSupervisor

SIZE_MIB = 24


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m,mode=700", "none", str(folder)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def closing(number: int) -> Closed:
    return Closed(ticket=number, domain="lake", reason="deadline", detail="x" * 2000, by="test")


async def test_who_publishes_waits_for_space_and_nothing_confirmed_is_lost(
    small: Path, run_name: str
) -> None:
    with BrokerServer(str(small / "store")) as server:
        keeper, bus = ServerSupervisor(server), await Bus.connect(server.url, run_name, name="test")
        try:
            await bus.ensure_streams()
            assert keeper.look() == []
            confirmed: list[int] = []

            async def publish() -> None:
                for number in range(1, 401):
                    seq = await bus.publish(SAMPLES, closing(number), ticket=number)
                    assert seq is not None
                    confirmed.append(seq)

            filler = small / "filler"
            with filler.open("wb", buffering=0) as out:
                os.posix_fallocate(
                    out.fileno(),
                    0,
                    os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 120_000,
                )
            publishing = asyncio.create_task(publish())
            said: list[str] = []
            async with asyncio.timeout(90):
                while not said:
                    await asyncio.sleep(0.2)
                    said += keeper.look()
                await asyncio.sleep(1.0)
                assert not publishing.done(), publishing
                assert keeper.look() == []
                filler.unlink()
                said += keeper.look()
                await publishing
            assert "no space left for the broker" in said[0]
            assert ": space again; broker" in said[1]
            last = await bus.last_seq(SAMPLES)
            found = {record.seq: record.ticket async for record in _until(bus, last)}
            assert {found[seq] for seq in confirmed} == set(range(1, 401))
            assert all(found[seq] == number for number, seq in enumerate(confirmed, start=1))
        finally:
            await bus.close()


async def _until(bus: Bus, last: int):  # type: ignore[no-untyped-def]
    async for record in bus.read_log(SAMPLES, 1):
        yield record
        if record.seq >= last:
            return


def test_a_dead_server_is_started_again_where_it_was(tmp_path: Path) -> None:
    with BrokerServer(str(tmp_path / "store")) as server:
        url, died = server.url, server.pid
        os.kill(died, signal.SIGKILL)
        while server.running:
            pass
        assert ServerSupervisor(server, revive=False).look() == []
        assert ServerSupervisor(server).look() == [
            f"broker (pid {died}) died; restarted as pid {server.pid}"
        ]
        assert (server.url, server.running) == (url, True)
        assert server.pid != died
