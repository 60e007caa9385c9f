"""What turns on a shared device cost: learner and rollout server of a real run in one host's
memory.

    python -m bench.shared [--params-m 100] [--steps 6] [--backend torch]

`rlearner up --share-gpus` trains a model of random weights, while the resident memory of learner
and server is read from the kernel every 20 ms (RssAnon: without files and shared memory), together
with who has the device.

``turn_s``: what one turn of the learner costs in addition to training: until the server sleeps,
until the learner has loaded and later offloaded its model, and until the server is awake again,
medians over the steps (``sleep_s``, ``load_s``, ``offload_s``, ``wake_s``; ``wait_s`` is from
asking for the device to having it, ``sleep_s`` included). ``resident_share``: (asleep - before
loading) / (awake - before loading) in resident memory, medians over the samples of the last half of
the run, of the worse of ``learner_share`` and ``server_share``. On a CPU what sleeps is in a file.
``lost`` and ``trained_twice`` are the audit's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil

from broker.contract import wire
from broker.contract.streams import DEVICES
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import watch_metrics
from broker.settings.run_address import noted_address
from broker.system.devices import host_name
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

EVERY_S: Final = 0.02
SETTLED_S: Final = 0.2  # after a change of turns
RUN: Final = "shared"
COMMAND: Final = [sys.executable, "-m", "rlearner.cli"]
MODULES: Final = {"learner": "rlearner.cli", "rollout": "rollout.cli"}
SMALL: Final = (
    *(
        "warm_start.steps=0",
        "eval.every_steps=0",
        "train.groups_per_step=2",
        "domains.lake.group_size=4",
    ),
    *(
        "domains.lake.max_turns=4",
        "envhub.n=8",
        "rollout.max_running=8",
        "checkpoint.every_steps=0",
    ),
)


def model_of(params_m: float) -> TinyModel:
    """Return the shape of a model of about this many million parameters."""
    width = 768
    layer = 4 * width * width + 3 * width * 2560
    layers = max(1, round(params_m * 1e6 / layer))
    return TinyModel(
        hidden_size=width,
        num_layers=layers,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        intermediate_size=2560,
        vocab="chars",
    )


@dataclass
class Memory:
    """Resident memory of one process over time."""

    before: int = 0  # at its first claim of the device, bytes
    # time, whether it has the device, bytes
    samples: list[tuple[float, bool, int]] = field(default_factory=list)

    def share(self, since: float) -> tuple[float, float] | None:
        """Return the share that stays while it sleeps, and the bytes that it has more when it is
        awake.

        None if turns are too short for memory to settle.
        """
        awake = [size for at, has, size in self._settled() if has and at >= since]
        asleep = [size for at, has, size in self._settled() if not has and at >= since]
        if not awake or not asleep:
            return None
        more = median(awake) - self.before
        return (median(asleep) - self.before) / more, more

    def _settled(self) -> list[tuple[float, bool, int]]:
        found = []
        changed = 0.0
        for number, (at, has, size) in enumerate(self.samples):
            if number and has != self.samples[number - 1][1]:
                changed = at
            if at - changed >= SETTLED_S:
                found.append((at, has, size))
        return found


def anonymous(pid: int) -> int:
    """Return RssAnon of a process in bytes, 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


async def watch(bus: Bus, up: subprocess.Popen[bytes], memory: dict[str, Memory]) -> None:
    """Sample both processes until cancelled."""
    pids: dict[str, int] = {}
    while True:
        if len(pids) < len(MODULES):
            children = {child.pid: child.cmdline() for child in psutil.Process(up.pid).children()}
            pids = {
                role: pid
                for role, module in MODULES.items()
                for pid, line in children.items()
                if module in line
            }
        found = await bus.key_value(DEVICES).get(f"{RUN}.{host_name()}")
        claims = (
            found[0].claims if found is not None and isinstance(found[0], wire.DeviceLease) else []
        )
        for role, pid in pids.items():
            own = [claim for claim in claims if claim.holder.startswith(role)]
            size = anonymous(pid)
            one = memory[role]
            one.before = one.before or (size if own else 0)
            if size and own:
                one.samples.append((time.monotonic(), any(claim.granted for claim in own), size))
        await asyncio.sleep(EVERY_S)


@dataclass
class Told:
    """The distinct seconds that the server reported of its turns."""

    sleep_s: list[float]
    wake_s: list[float]


async def listen(bus: Bus, told: Told) -> None:
    """Collect what the server reports."""
    names = {"turns/sleep_seconds": told.sleep_s, "turns/wake_seconds": told.wake_s}
    async for metrics in watch_metrics(bus):
        for name, values in names.items():
            value = metrics.values.get(name, 0.0)
            if metrics.role == "rollout" and value and value not in values:
                values.append(value)


async def observe(
    address: str, up: subprocess.Popen[bytes], memory: dict[str, Memory], told: Told
) -> None:
    """Sample and listen until the run is over."""
    bus = await Bus.connect(address, RUN, name="bench", deadline_s=60.0)
    tasks = [asyncio.create_task(work) for work in (listen(bus, told), watch(bus, up, memory))]
    await asyncio.to_thread(up.wait)  # reads wait for a broker, which ends before
    for task in tasks:
        if not task.cancel():
            task.result()
    await asyncio.gather(*tasks, return_exceptions=True)
    await bus.close()


def measure(folder: Path, params_m: float, steps: int, backend: str) -> dict[str, Any]:
    """Run and return the figures.

    Raises:
        RuntimeError: if the run fails.
    """
    path = build_tiny(folder / "model", model_of(params_m))
    given = [
        f"run.dir={folder}",
        f"run.name={RUN}",
        f"train.steps={steps}",
        f"train.backend={backend}",
        *SMALL,
    ]
    up = subprocess.Popen(
        [*COMMAND, "up", "configs/quickstart.yaml", *given, f"model.path={path}", "--share-gpus"],
        stdout=sys.stderr,
    )
    memory = {role: Memory() for role in MODULES}
    told = Told([], [])
    try:
        while not (address := noted_address(folder / RUN)) and up.poll() is None:
            time.sleep(EVERY_S)
        began = time.monotonic()
        if up.poll() is None:
            asyncio.run(observe(address, up, memory, told))
    finally:
        if up.poll() is None:
            up.terminate()
            up.wait()
    if up.returncode:
        raise RuntimeError(f"the run ended with exit code {up.returncode}")
    half = (began + time.monotonic()) / 2
    audit = subprocess.run(
        [*COMMAND, "audit", str(folder / RUN)], stdout=subprocess.PIPE, text=True, check=False
    )
    words = audit.stdout.split()
    return {
        **seconds_of(folder / RUN / "metrics.jsonl", told),
        **shares_of({role: one.share(half) for role, one in memory.items()}),
        "params_m": round(sum(file.stat().st_size for file in path.glob("*.safetensors")) / 4e6, 1),
        "lost": int(words[words.index("lost") + 1]),
        "trained_twice": int(words[words.index("trained_twice") + 1]),
    }


def seconds_of(metrics: Path, told: Told) -> dict[str, float | None]:
    """Return what a turn takes; None for what no turn showed.

    The first turn, which also builds what later ones reuse, counts only if it trained every step.
    """
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    with_turns = [line for line in lines if line["turns/count"]]
    turns = with_turns[1:] or with_turns
    names = ("turn_wait", "turn_load", "turn_offload")
    found: dict[str, float | None] = {
        name: median(line[f"time/{name}"] / line["turns/count"] for line in turns) for name in names
    }
    found["wake"] = median(told.wake_s) if told.wake_s else None
    known = [value for value in found.values() if value is not None]
    found = {
        "turn_s": sum(known) if len(known) == len(found) else None,
        "wait_s": found["turn_wait"],
        "sleep_s": median(told.sleep_s) if told.sleep_s else None,
        "load_s": found["turn_load"],
        "offload_s": found["turn_offload"],
        "wake_s": found["wake"],
        "train_s": median(line["time/train"] for line in lines[1:]),
        "turns": float(sum(line["turns/count"] for line in lines)),
    }
    return {name: value if value is None else round(value, 3) for name, value in found.items()}


def shares_of(shares: dict[str, tuple[float, float] | None]) -> dict[str, float | None]:
    """Return the shares of memory that stay, and the MiB that each process has more when it is
    awake.
    """
    if shares["learner"] is None or shares["rollout"] is None:
        return dict.fromkeys(
            ("resident_share", "learner_share", "server_share", "learner_mib", "server_mib")
        )
    (learner, learner_bytes), (server, server_bytes) = shares["learner"], shares["rollout"]
    found = {
        "resident_share": max(learner, server),
        "learner_share": learner,
        "server_share": server,
    }
    found |= {"learner_mib": learner_bytes / 2**20, "server_mib": server_bytes / 2**20}
    return {name: round(value, 4) for name, value in found.items()}


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.shared", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--params-m", type=float, default=100.0, help="million parameters (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--backend", default="torch", help="train.backend (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlearner-shared-") as folder:
        print(json.dumps(measure(Path(folder), options.params_m, options.steps, options.backend)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
