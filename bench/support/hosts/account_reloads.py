"""What accounts cost a broker of many runs: the size of its configuration, and a reload while
processes work.
"""

from __future__ import annotations

import asyncio
import re
import statistics
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.permissions import JOINING, LEARNER
from broker.contract.streams import TICKETS
from broker.identity.key_folder import AUTHORIZATION, BrokerUser, KeyFolder
from broker.identity.keys import Key
from broker.identity.login import find_login
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer

RUNS: Final = 50
WORKING: Final = 3  # runs with a hub that takes tickets during the reloads
RELOADS: Final = 11
FETCH_S: Final = 2.0
LIMIT_S: Final = 120.0
_LINE: Final = re.compile(
    r"\] (\S+ \S+) \[INF\] (Trapped \"hangup\"|Reloaded server configuration)"
)


def measure_accounts(folder: Path) -> dict[str, Any]:
    """Return the size of the configuration, the median time of a reload, and what the reloads lost."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = KeyFolder(folder / "store.keys")
    for number in range(RUNS):
        for role in (LEARNER, *JOINING):
            keys.role(role, _run(number))  # no server runs yet, so nothing is reloaded
    with BrokerServer(str(folder / "store"), store_max_gib=1024) as server:
        dropped = asyncio.run(_work_through_reloads(server, keys))
        took = _reload_ms(server.log_path.read_text())
    size = (keys.path / AUTHORIZATION).stat().st_size
    figures = {
        "runs": RUNS,
        "config_kib": round(size / 1024),
        "reload_ms": round(statistics.median(took), 1),
    }
    return figures | {"dropped": dropped}


def _run(number: int) -> str:
    return f"run-{number}"


async def _work_through_reloads(server: BrokerServer, keys: KeyFolder) -> int:
    """Let hubs take tickets while tokens are added; return lost connections, and tickets that did
    not arrive once.
    """
    lost: list[str] = []
    learners = list[Bus]()
    hubs = list[Bus]()
    for number in range(WORKING):
        for role, buses in ((LEARNER, learners), ("envhub", hubs)):
            login = find_login(server.url, role, _run(number))
            bus = await Bus.connect(
                server.url, _run(number), name=role, role=role, login=login, deadline_s=60
            )
            bus.link.on_disconnect.add(lambda name=f"{role} {number}": lost.append(name))  # type: ignore[misc]
            buses.append(bus)
        await learners[-1].ensure_streams()
        await learners[-1].ensure_consumers(TICKETS, ["lake"])
    arrived: list[tuple[int, int]] = []
    taking = [asyncio.create_task(_take(number, hub, arrived)) for number, hub in enumerate(hubs)]
    sent = 0
    for number in range(RELOADS):
        user = BrokerUser(
            Key.generate().public, "envhub", _run(number), name=f"host-{number}", expires_at=0
        )
        admitting = asyncio.create_task(asyncio.to_thread(keys.admit, user))
        while True:
            for learner in learners:
                await learner.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
            sent += 1
            if admitting.done():
                break
        await admitting
    with suppress(TimeoutError):
        async with asyncio.timeout(LIMIT_S):
            while len(set(arrived)) < sent * WORKING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    for task in taking:
        task.cancel()
    await asyncio.gather(*taking, return_exceptions=True)
    dropped = len(lost) + sent * WORKING - len(set(arrived))
    for bus in (*learners, *hubs):
        await bus.close()
    return dropped


async def _take(number: int, hub: Bus, arrived: list[tuple[int, int]]) -> None:
    queue = await hub.work_queue(TICKETS, "lake")
    while True:
        for delivery in await queue.fetch(64, FETCH_S):
            arrived.append((number, delivery.seq))
            await delivery.ack()


def _reload_ms(log: str) -> list[float]:
    """Return the milliseconds from each signal to the end of its reload."""
    took = list[float]()
    since = None
    for when, what in _LINE.findall(log):
        at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f")
        if what.startswith("Trapped"):
            since = at
        elif since is not None:
            took.append((at - since).total_seconds() * 1e3)
    return took
