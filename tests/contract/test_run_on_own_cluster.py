"""A whole run on a nats-server of the user's own, each process with a login of its role only."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import learner_fleet as fleet
import msgspec
import pytest
from own_server import own_server, reload

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import DEAD, RUNS, TICKETS
from broker.identity.cluster_login import NKEY
from broker.identity.login import KEYS, find_login
from broker.identity.signatures import HEADER
from broker.jetstream.api import find
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from learner.service import serve

RUN = "own"


def command(*words: str, keys: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, KEYS: str(keys)}
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=True, env=env)


async def test_its_groups_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, elsewhere = tmp_path / "keys", str(tmp_path / "another_host")
    printed = ["broker.cli", "permissions", "--run", RUN]
    with own_server(tmp_path / "server", include=command(*printed, keys=keys).stdout) as url:
        for role in ("rollout", "envhub"):
            where = ["--run", RUN, "--broker", url, "--out", str(tmp_path / f"{role}.token")]
            invited = command("rlearner.cli", "invite", role, *where, keys=keys)
            assert invited.stderr == (
                "it takes effect when your servers reload the new output of `broker permissions`\n"
            )
        reload(tmp_path / "server", command(*printed, keys=keys).stdout)
        train = {"steps": 2, "groups_per_step": 2, "max_staleness": 1}
        config = fleet.config(str(tmp_path), RUN, train=train)
        clean = {**os.environ, "XDG_STATE_HOME": elsewhere}
        hub = {NKEY: str(keys / RUN / "envhub.key")}
        children = [
            subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True, env=clean | env)  # noqa: ASYNC220
            for words, env in (
                (["rollout.cli", "--join", str(tmp_path / "rollout.token"), "--engine", "random", "--id", "r1"], {}),
                (["envhub.cli", "--join", str(tmp_path / "envhub.token"), "--n", "2"], hub),
            )
        ]
        monkeypatch.setenv(KEYS, str(keys))
        stop = Stop()

        async def end(child: subprocess.Popen[str]) -> int:
            """Its exit code; without it the run cannot end."""
            code = await asyncio.to_thread(child.wait)
            stop.request("a child has ended")
            return code

        ending = [asyncio.create_task(end(child)) for child in children]
        try:
            async with asyncio.timeout(240):
                await serve(config, url, stop, connect_deadline_s=60)
                ends = await asyncio.gather(*ending)
        finally:
            for child in children:
                child.kill()
                print(child.communicate()[1])
        assert ends == [0, 0]
        last = json.loads((tmp_path / RUN / "metrics.jsonl").read_text().splitlines()[-1])
        assert (last["ticket/trained"], last["ticket/open"]) == (4, 0)
        operator = await Bus.connect(url, RUN, name="operator", deadline_s=20)
        assert await operator.depth(TICKETS) == {}
        assert await operator.depth(DEAD) == {"": 0}
        await check_signatures(operator, url)
        await operator.close()


async def check_signatures(operator: Bus, url: str) -> None:
    """The learner signed its RunSpec, and a process with the owner's public key follows no other."""
    place = f"{RUNS.key_prefix(RUN)}{RUN}"
    stored = await find(operator.link, RUNS.stream_name(RUN), last_of=place)
    assert stored is not None
    assert HEADER in (stored.headers or {})
    hub = await Bus.connect(url, RUN, name="hub", login=find_login(url, "envhub", RUN), deadline_s=20)
    assert await hub.key_value(RUNS).get(RUN) is not None
    forged = codec.encode(msgspec.structs.replace(EXAMPLES[wire.RunSpec], run=RUN, epoch=99))
    await operator.link.send(place, forged)
    await asyncio.sleep(0.3)
    assert await hub.key_value(RUNS).get(RUN) is None
    await hub.close()
