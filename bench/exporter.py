"""What the exporter of a run costs, by the number of processes: a real exporter, and messages of
made-up processes.

Each of them publishes 40 metrics and a few spans every second, a tenth are servers that beat each
second, and the rest have entries among the members, as in a real fleet. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

import psutil

from broker.contract import codec, wire
from broker.contract.streams import MEMBERS, METRICS, PRESENCE, RUNS
from broker.jetstream.bus import Bus
from broker.runtime.vouching import PresenceSigner
from broker.server.private_server import BrokerServer

RUN: Final = "bench"
SIZES: Final = (50, 500)
SETTLE_S: Final = 10.0
WINDOW_S: Final = 20.0
SCRAPE_EVERY_S: Final = 5.0
VALUES: Final = {f"envhub/measured_{number}": 0.5 for number in range(39)} | {"envhub/groups": 3.0}


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    rows = [asyncio.run(measure(size)) for size in parser.parse_args().sizes]
    print(json.dumps({"exporter": rows}))


async def measure(size: int) -> dict[str, Any]:
    """Return the exporter's cost with this many processes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        BrokerServer(str(Path(folder) / "store")) as server,
    ):
        bus = await Bus.connect(server.url, RUN, name="bench", deadline_s=30)
        await bus.ensure_streams()
        spec = wire.RunSpec(
            run=RUN, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="m"
        )
        await bus.key_value(RUNS).put(RUN, spec)
        command = [
            sys.executable,
            "-m",
            "rlearner.cli",
            "exporter",
            RUN,
            "--broker",
            server.url,
            "--metrics-port",
            "0",
        ]
        with (Path(folder) / "log").open("wb") as log:
            child = subprocess.Popen(command, cwd=folder, stderr=log)  # noqa: ASYNC220
        publishing = asyncio.create_task(publish(bus, size))
        try:
            return {"processes": size, **await observe(child, Path(folder) / "log", publishing)}
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            child.terminate()
            await asyncio.to_thread(child.wait)
            await bus.close()


async def publish(bus: Bus, size: int) -> None:
    """Publish what the processes of a run do, each second."""
    signer = PresenceSigner(bus)
    span = wire.Span(kind="generate", start=1.0, end=2.0, seconds=1.0, count=3)
    beats = dict[str, bytes]()
    metrics = dict[str, bytes]()
    for number in range(size):
        role = "rollout" if number % 10 == 0 else "envhub"
        name = f"{role}-{number}"
        about = {"host": "here", "pid": 1, "state": "serving", "slots": 8, "running": 3}
        presence = signer.signed(wire.Presence(role=role, id=name, **about))  # type: ignore[arg-type]
        message = wire.Metrics(role=role, id=name, time=0.0, values=VALUES, spans=[span] * 3)
        metrics[METRICS.subject(bus.run, f"{role}.{name}")] = codec.encode(message)
        if role == "rollout":
            beats[PRESENCE.subject(bus.run, f"{role}.{name}")] = codec.encode(presence)
        await bus.key_value(MEMBERS).put(f"{bus.run}.{role}.{name}", presence)
    while True:
        due = time.monotonic() + 1.0
        for subject, data in (*metrics.items(), *beats.items()):
            await bus.link.send(subject, data)
        await asyncio.sleep(max(0.0, due - time.monotonic()))


async def observe(
    child: subprocess.Popen[bytes], log: Path, publishing: asyncio.Task[None]
) -> dict[str, Any]:
    """Return share of a core, memory, and time and size of a scrape."""
    url = await asyncio.to_thread(_address, log)
    await asyncio.sleep(SETTLE_S)
    process = psutil.Process(child.pid)
    before = _cpu(process)
    began = time.monotonic()
    scrapes = list[float]()
    text = ""
    while time.monotonic() - began < WINDOW_S and not publishing.done():
        asked = time.monotonic()
        text = await asyncio.to_thread(
            lambda: urllib.request.urlopen(url, timeout=30).read().decode()
        )
        scrapes.append(time.monotonic() - asked)
        await asyncio.sleep(SCRAPE_EVERY_S)
    seconds = time.monotonic() - began
    shown = sum(
        float(count) for count in re.findall(r"^rlearner_processes\{.*\} (\S+)$", text, re.M)
    )
    return {
        "cpu_share": round((_cpu(process) - before) / seconds, 4),
        "resident_mib": round(process.memory_info().rss / 2**20, 1),
        "scrape_s": round(sorted(scrapes)[len(scrapes) // 2], 3),
        "scrape_mib": round(len(text) / 2**20, 2),
        "processes_shown": int(shown),
    }


def _address(log: Path) -> str:
    while not (found := re.search(r"metrics at (\S+)", log.read_text())):
        time.sleep(0.1)
    return found[1]


def _cpu(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


if __name__ == "__main__":
    main()
