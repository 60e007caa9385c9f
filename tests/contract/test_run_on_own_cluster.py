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
from own_authority import OwnAuthority
from own_server import own_server, reload

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import DEAD, RUNS, TICKETS
from broker.identity.cluster_login import CA, CERT, CERT_KEY, NKEY
from broker.identity.login import KEYS, find_login
from broker.identity.signatures import HEADER
from broker.jetstream.api import find_message
from broker.jetstream.bus import Bus
from broker.runtime.process import Stop
from broker.settings.run_settings import RunSettings
from learner.service import serve_learner

RUN = "own"


def command(*words: str, keys: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, KEYS: str(keys)}
    return subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, check=True, env=env
    )


async def train(
    url: str, folder: Path, rollout: list[str], envhub: list[str], hub_env: dict[str, str]
) -> None:
    """Train two steps with a learner in this process and two processes of a user without the keys
    of any broker.

    Args:
        rollout: more words of the rollout server's command; ``envhub`` likewise.
        hub_env: variables of the hub.
    """
    settings = {"steps": 2, "groups_per_step": 2, "max_staleness": 1}
    config = fleet.config(str(folder), RUN, train=settings)
    clean = {**os.environ, "XDG_STATE_HOME": str(folder / "another_host")}
    clean.pop(KEYS, None)
    children = [
        subprocess.Popen([sys.executable, "-m", *words], stderr=subprocess.PIPE, text=True, env=env)  # noqa: ASYNC220
        for words, env in (
            (["rollout.cli", "--engine", "random", "--id", "r1", *rollout], clean),
            (["envhub.cli", "--n", "2", *envhub], clean | hub_env),
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
            await serve_learner(RunSettings.of_config(config), url, stop, connect_deadline_s=60)
            ends = await asyncio.gather(*ending)
    finally:
        for child in children:
            child.kill()
            print(child.communicate()[1])
    assert ends == [0, 0]
    last = json.loads((folder / RUN / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["ticket/trained"], last["ticket/open"]) == (4, 0)


async def test_its_groups_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    printed = ["broker.cli", "permissions", "--run", RUN]
    with own_server(tmp_path / "server", include=command(*printed, keys=keys).stdout) as url:
        for role in ("rollout", "envhub"):
            where = ["--run", RUN, "--broker", url, "--out", str(tmp_path / f"{role}.token")]
            invited = command("rlearner.cli", "invite", role, *where, keys=keys)
            assert invited.stderr == (
                "it takes effect when your servers reload the new output of `broker permissions`\n"
            )
        reload(tmp_path / "server", command(*printed, keys=keys).stdout)
        monkeypatch.setenv(KEYS, str(keys))
        joins = [["--join", str(tmp_path / f"{role}.token")] for role in ("rollout", "envhub")]
        await train(url, tmp_path, *joins, hub_env={NKEY: str(keys / RUN / "envhub.key")})
        operator = await Bus.connect(url, RUN, name="operator", deadline_s=20)
        assert await operator.depth(TICKETS) == {}
        assert await operator.depth(DEAD) == {"": 0}
        await check_signatures(operator, url)
        await operator.close()


async def test_with_client_certificates_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = OwnAuthority(tmp_path / "pki")
    logins = {}
    for role in ("learner", "rollout", "envhub"):
        certificate, key = authority.certificate(f"{RUN}.{role}")
        logins[role] = {CERT: str(certificate), CERT_KEY: str(key), CA: str(authority.file)}
    certificate, key = authority.certificate("server")
    tls = f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.file}", verify_and_map: true }}'
    users = command(
        "broker.cli", "permissions", "--run", RUN, "--login", "certificate", keys=tmp_path / "keys"
    ).stdout
    with own_server(tmp_path / "server", include=users, more=tls) as url:
        for name, value in logins["rollout"].items():
            monkeypatch.setenv(name, value)
        where = ["--broker", url.replace("nats://", "tls://"), "--run", RUN]
        training = asyncio.create_task(
            train(where[1], tmp_path, where, where, hub_env=logins["envhub"])
        )
        await asyncio.sleep(0)  # its processes have started with their environment
        for name, value in logins["learner"].items():
            monkeypatch.setenv(name, value)
        await training


async def check_signatures(operator: Bus, url: str) -> None:
    """The learner signed its RunSpec, and a process with the owner's public key follows no other."""
    place = f"{RUNS.key_prefix(RUN)}{RUN}"
    stored = await find_message(operator.link, RUNS.stream_name(RUN), last_of=place)
    assert stored is not None
    assert HEADER in (stored.headers or {})
    hub = await Bus.connect(
        url, RUN, name="hub", login=find_login(url, "envhub", RUN), deadline_s=20
    )
    assert await hub.key_value(RUNS).get(RUN) is not None
    forged = codec.encode(msgspec.structs.replace(EXAMPLES[wire.RunSpec], run=RUN, epoch=99))
    await operator.link.send(place, forged)
    await asyncio.sleep(0.3)
    assert await hub.key_value(RUNS).get(RUN) is None
    await hub.close()
