"""What logins cost: processor time of the same run with a broker that has them, and with one that
has none.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from bench.scale import null
from bench.support.fleet import LOOPBACK, RunFleet
from broker.contract import wire
from broker.server.private_server import HEADROOM_BYTES, find_binary
from broker.system.children import spawn

STEPS: Final = 25
GROUPS: Final = 8  # 200 tickets together
LIMIT_S: Final = 240.0


@dataclass
class OpenFleet(RunFleet):
    """A fleet whose broker has no logins, so its clients use none and nothing is signed."""

    def start_broker(self) -> None:
        store = self.folder / "broker"
        store.mkdir()
        payload = wire.MAX_PAYLOAD_BYTES + HEADROOM_BYTES
        lines = [f'host: "{LOOPBACK}"', f"port: {self.port}", f"max_payload: {payload}"]
        lines.append(f'jetstream {{ store_dir: "{store}" }}')
        (store / "nats-server.conf").write_text("\n".join(lines) + "\n")
        with (store / "nats-server.log").open("ab") as log:
            self._open = spawn([find_binary(), "-c", str(store / "nats-server.conf")], log)

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        self._open.terminate()
        self._open.wait()


def measure_cost(folder: Path, num_pairs: int) -> dict[str, Any]:
    """Return the extra processor seconds of logins, median of interleaved pairs, as a share of the
    quickstart's.
    """
    extra = list[float]()
    kinds: list[type[RunFleet]] = [RunFleet, OpenFleet]
    for pair in range(num_pairs):
        took = dict[type[RunFleet], float]()
        for kind in kinds if pair % 2 == 0 else reversed(kinds):
            took[kind] = _cpu_s(kind, folder / f"{kind.__name__}-{pair}")
        extra.append(took[RunFleet] - took[OpenFleet])
        print(
            f"pair {pair}: {took[RunFleet]:.2f} s with logins, {took[OpenFleet]:.2f} s without",
            flush=True,
        )
    before = _spent_s()
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "up",
        "configs/quickstart.yaml",
        f"run.dir={folder}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    quickstart_s = _spent_s() - before
    return {
        "identity_cost": round(statistics.median(extra) / quickstart_s, 4),
        "identity_extra_s": round(statistics.median(extra), 2),
        "quickstart_cpu_s": round(quickstart_s, 1),
    }


def _cpu_s(kind: type[RunFleet], folder: Path) -> float:
    folder.mkdir(parents=True)
    before = _spent_s()
    asyncio.run(_play(kind(folder / "fleet", "cost"), folder))
    return _spent_s() - before


async def _play(fleet: RunFleet, folder: Path) -> None:
    lake = {"env": "frozenlake", "env_args": {"observe": "cell"}, "group_size": 8, "max_turns": 10}
    lake |= {"max_context_tokens": 256, "sampling": {"max_tokens": 4}}
    train: dict[str, Any] = {
        "backend": f"{null.__file__}:NullBackend",
        "steps": STEPS,
        "groups_per_step": GROUPS,
    }
    train["max_staleness"] = STEPS  # the engine random keeps version 0
    config: dict[str, Any] = {
        "run": {"name": "cost", "dir": str(folder / "runs")},
        "model": {"path": None},
    }
    config |= {
        "domains": {"lake": lake},
        "train": train | {"num_threads": 1},
        "trackers": {"use": []},
    }
    config |= {"rollout": {"engine": "random", "max_context_tokens": 256}, "envhub": {"n": 64}}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    async with fleet:
        fleet.add("learner", "learner", "start", str(file))
        fleet.add("rollout", "rollout-0", "--gpus", "cpu")
        fleet.add("envhub", "envhub-0")
        await fleet.wait_done(fleet.children, LIMIT_S)
        if fleet.crashes:
            raise RuntimeError("\n".join(fleet.crashes))


def _spent_s() -> float:
    """Return the processor seconds of all children that have ended, with their children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
