"""The hub of docs/third_party_hub.py, which shares no code with this project, under a real learner
and a real rollout server.
"""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from pathlib import Path

import learner_fleet as fleet
from declared_metrics import undeclared

from broker.contract.streams import DEAD, TICKETS
from broker.identity import tokens
from broker.identity.login import keys_of
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.service import serve_learner

HUB = Path(__file__).parents[2] / "docs" / "third_party_hub.py"


def test_it_imports_nothing_of_this_project() -> None:
    imported = set()
    for node in ast.walk(ast.parse(HUB.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"msgpack", "nats", "nkeys", "zmq"}


async def test_its_groups_are_trained(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    # every ticket allows version 0, the only one of engine random
    train = {"steps": 2, "groups_per_step": 2, "max_staleness": 1}
    config = fleet.config(str(tmp_path), run_name, train=train)
    token = tmp_path / "hub.token"
    tokens.write_token(
        tokens.make_join_token(keys_of(broker_url), broker_url, "envhub", run_name, expires_s=600),
        token,
    )
    children = [
        subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)  # noqa: ASYNC220
        for arguments in (
            [
                "-m",
                "rollout.cli",
                "--broker",
                broker_url,
                "--run",
                run_name,
                "--engine",
                "random",
                "--id",
                "r1",
            ],
            [str(HUB), broker_url, run_name, "lake", str(token)],
        )
    ]
    stop = Stop()

    async def end(child: subprocess.Popen[str]) -> int:
        """Its exit code; without it the run cannot end."""
        code = await asyncio.to_thread(child.wait)
        stop.request("a child has ended")
        return code

    ending = [asyncio.create_task(end(child)) for child in children]
    try:
        async with asyncio.timeout(240):
            await serve_learner(
                RunSettings.of_config(config), broker_url, stop, connect_deadline_s=60
            )
            ends = await asyncio.gather(*ending)
    finally:
        for child in children:
            child.kill()
            print(child.communicate()[1])
    assert ends == [0, 0]
    assert await bus.depth(TICKETS) == {}
    assert await bus.depth(DEAD) == {"": 0}
    last = json.loads((tmp_path / run_name / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: last[f"ticket/{name}"] for name in ("issued", "trained", "dropped", "dead", "open")} == {
        "issued": 4, "trained": 4, "dropped": 0, "dead": 0, "open": 0,
    }  # fmt: skip
    assert undeclared(last) == set()
    assert 1.0 <= last["response_length/mean"] <= 4.0
    assert 0.0 <= last["reward/lake/mean"] <= 1.0
