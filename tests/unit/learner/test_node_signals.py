"""A signal to every process of a node, as Slurm and systemd send it, asks its ranks to wait for
rank 0 once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waits import until

RANK = """import sys, time
from types import SimpleNamespace
from learner.nodes.rank import _handle_signals

with _handle_signals(SimpleNamespace(joined=sys.argv[1] == "joined")):
    print("ready", flush=True)
    time.sleep(60)
"""
NODE = f"""import subprocess, sys
from learner.nodes import local_ranks

local_ranks.spawn_rank = lambda start: subprocess.Popen([sys.executable, "-c", {RANK!r}, start])
sys.exit(local_ranks.run_node([sys.argv[1]]))
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "node.log"


@pytest.fixture
def node(log: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        command = [sys.executable, "-c", NODE, request.param]
        made = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    yield made
    if made.poll() is None:
        os.killpg(made.pid, signal.SIGKILL)
    made.wait()


async def ready(log: Path) -> None:
    await until(lambda: "ready" in log.read_text())


@pytest.mark.parametrize("node", ["joined"], indirect=True)
async def test_a_rank_that_has_joined_waits_until_the_second_signal(
    node: subprocess.Popen[bytes], log: Path
) -> None:
    await ready(log)
    (rank,) = psutil.Process(node.pid).children()
    rank.terminate()
    await until(lambda: "this rank ends when rank 0 does" in log.read_text())
    node.terminate()  # which tells the rank once more
    with pytest.raises(subprocess.TimeoutExpired):
        node.wait(1.0)
    node.terminate()
    assert node.wait(10) == 130


@pytest.mark.parametrize("node", ["joining"], indirect=True)
async def test_a_rank_that_has_not_joined_ends_at_once(
    node: subprocess.Popen[bytes], log: Path
) -> None:
    await ready(log)
    node.terminate()
    assert node.wait(10) == 130
