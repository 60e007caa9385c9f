"""Measure the sandboxes of the provider ``namespace``.

    python -m bench.sandboxes [--live 200] [--kills 10]

A start counts once a first command has run. The last line is one JSON object: starts_per_s;
reset_ms and command_ms (medians); live, how many sandboxes were alive at once, each with a file of
its own that a command wrote and another read; disk_mib_per_task and memory_mib_per_task of those;
provider_kills, how often the process that makes sandboxes, or the whole process that uses it, was
killed in the middle of episodes; zero_rewards, how many of these episodes ended with a reward of
zero; leaked, how many processes, folders and mounts were left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from rlearner_sandbox.providers import SandboxError, SandboxSpec
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider
from rlearner_sandbox.providers.owner import remove_leftovers, start_ticks
from rlearner_sandbox.providers.trees import tree_bytes

SPEC: Final = SandboxSpec()
STARTS: Final = 60
PARALLEL: Final = 4
RESETS: Final = 15
EPISODES: Final = 6
ATTEMPTS: Final = 4
# Starts sandboxes until it is killed; prints a line when it has some.
USER: Final = """import asyncio, sys
from pathlib import Path
from rlearner_sandbox.providers import SandboxSpec
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider

async def main():
    provider = NamespaceProvider(Path(sys.argv[1]))
    for _ in range(3):
        sandbox = await provider.start(SandboxSpec())
        await sandbox.run_command("echo data > file; (setsid sleep 1000 &)")
    print("up", flush=True)
    await sandbox.run_command("sleep 1000", timeout_s=1000)

asyncio.run(main())
"""


def measure_provider(*, live: int = 200, kills: int = 10, starts: int = STARTS) -> dict[str, Any]:
    """Return the figures of the provider ``namespace``."""
    folder = Path(tempfile.mkdtemp(prefix="sandboxes-", dir="/var/tmp"))
    try:
        return asyncio.run(_measure(folder, live=live, kills=kills, starts=starts))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(folder: Path, *, live: int, kills: int, starts: int) -> dict[str, Any]:
    provider = NamespaceProvider(folder)
    first = await provider.start(SPEC)
    await first.run_command("true")
    figures = {"starts_per_s": round(await _measure_starts(provider, starts), 1)}
    figures |= await _measure_calls(first)
    await first.stop()
    figures |= await _measure_live(provider, live)
    await provider.close()
    figures |= await _measure_kills(folder, kills)
    return figures


async def _measure_starts(provider: NamespaceProvider, starts: int) -> float:
    limit = asyncio.Semaphore(PARALLEL)
    sandboxes = []

    async def start() -> None:
        async with limit:
            sandbox = await provider.start(SPEC)
            result = await sandbox.run_command("true")
            assert result.exit_code == 0
            sandboxes.append(sandbox)

    began = time.perf_counter()
    await asyncio.gather(*(start() for _ in range(starts)))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return starts / seconds


async def _measure_calls(sandbox: Any) -> dict[str, float]:
    resets = []
    commands = []
    for _ in range(RESETS):
        began = time.perf_counter()
        await sandbox.run_command("true")
        commands.append(time.perf_counter() - began)
        await sandbox.run_command("mkdir -p d; for i in 1 2 3; do echo $i > d/$i; done; sleep 9 &")
        began = time.perf_counter()
        await sandbox.reset()
        resets.append(time.perf_counter() - began)
    result = await sandbox.run_command("ls")
    assert not result.stdout
    return {
        "reset_ms": round(1e3 * statistics.median(resets), 1),
        "command_ms": round(1e3 * statistics.median(commands), 1),
    }


async def _measure_live(provider: NamespaceProvider, live: int) -> dict[str, float]:
    """Start sandboxes, let each write, then let each read what it wrote, while all are alive."""
    limit = asyncio.Semaphore(2 * PARALLEL)
    memory = psutil.virtual_memory().available
    names = [secrets.token_hex(4) for _ in range(live)]

    async def start(name: str) -> Any:
        async with limit:
            sandbox = await provider.start(SPEC)
            await sandbox.run_command(f"echo {name} > mine; head -c 100000 /dev/urandom > data")
            return sandbox

    sandboxes = await asyncio.gather(*(start(name) for name in names))

    async def read(sandbox: Any) -> str:
        async with limit:
            result = await sandbox.run_command("cat mine")
            return str(result.stdout.decode().strip())

    replies = await asyncio.gather(*map(read, sandboxes))
    taken = max(0, memory - psutil.virtual_memory().available)
    figures = {
        "live": sum(reply == name for reply, name in zip(replies, names, strict=True)),
        "disk_mib_per_task": round(tree_bytes(provider.folder) / 2**20 / live, 2),
        "memory_mib_per_task": round(taken / 2**20 / live, 1),
    }
    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    return figures


async def _measure_kills(folder: Path, kills: int) -> dict[str, int]:
    """Kill wardens under episodes, and whole users of the provider, by turns."""
    rewards: list[float] = []
    seen: set[tuple[int, int]] = set()
    provider = NamespaceProvider(folder)
    for number in range(kills):
        if number % 2:
            _kill_user(folder, seen)
        else:
            rewards += await _kill_warden(provider, seen)
    await provider.close()
    remove_leftovers(folder)
    alive, others = await asyncio.to_thread(_count_leftovers, folder, seen)
    return {
        "provider_kills": kills,
        "killed_episodes": len(rewards),
        "zero_rewards": sum(reward == 0 for reward in rewards),
        "leaked": alive + others,
    }


async def _kill_warden(provider: NamespaceProvider, seen: set[tuple[int, int]]) -> list[float]:
    episodes = [asyncio.ensure_future(_play(provider, number)) for number in range(EPISODES)]
    await asyncio.sleep(0.15)
    warden = (await provider.open_link()).pid
    _note_family(warden, seen)
    os.kill(warden, signal.SIGKILL)
    return await asyncio.gather(*episodes)


async def _play(provider: NamespaceProvider, number: int) -> float:
    """Play an episode of three commands; one that the provider fails is played again."""
    for _ in range(ATTEMPTS):
        try:
            sandbox = await provider.start(SPEC)
            await sandbox.run_command(f"echo {number} > a")
            await sandbox.run_command("sleep 0.2")
            result = await sandbox.run_command("cat a")
            await sandbox.stop()
            return float(result.stdout.decode().strip() == str(number))
        except SandboxError:
            continue
    raise SystemExit("an episode failed in every attempt")


def _kill_user(folder: Path, seen: set[tuple[int, int]]) -> None:
    command = [sys.executable, "-c", USER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"up\n"
        _note_family(user.pid, seen)
        user.kill()


def _note_family(pid: int, seen: set[tuple[int, int]]) -> None:
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    seen |= {(member, start_ticks(member)) for member in family}


def _count_leftovers(folder: Path, seen: set[tuple[int, int]]) -> tuple[int, int]:
    """Return how many processes are left after a while, and how many folders and mounts."""
    deadline = time.monotonic() + 10
    while _alive(seen) and time.monotonic() < deadline:
        time.sleep(0.05)
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").count(str(folder))
    return len(_alive(seen)), len(list((folder / "live").iterdir())) + mounts


def _alive(seen: set[tuple[int, int]]) -> list[int]:
    return [pid for pid, ticks in seen if ticks and start_ticks(pid) == ticks]


def main() -> int:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--live", type=int, default=200, help="sandboxes at once (%(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="kills (%(default)s)")
    parser.add_argument("--starts", type=int, default=STARTS, help="starts (%(default)s)")
    options = parser.parse_args()
    figures = measure_provider(live=options.live, kills=options.kills, starts=options.starts)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
