"""Join tokens: written by the operator, used by a process without the broker's keys, revoked while
it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waits import LONG_S

from broker.contract import wire
from broker.errors import UserError
from broker.identity import tokens
from broker.identity.key_folder import BrokerUser, KeyFolder
from broker.identity.login import find_login, keys_of
from broker.jetstream.bus import Bus
from broker.server.private_server import BrokerServer
from broker.server.server_supervisor import ServerSupervisor
from broker.settings.runspec import load, publish_runspec, validate
from rlearner.ops.status import expiring_tokens


def rlearner(*arguments: str, url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlearner.cli", *arguments, "--broker", url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user who has no keys of the broker."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}


def hub(env: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rewardhub.cli", *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=env
    )


def read_until(child: subprocess.Popen[str], text: str) -> str:
    assert child.stderr is not None
    for line in child.stderr:
        if text in line:
            return line
    raise AssertionError(f"{text} is not in the log")


async def _published(bus: Bus) -> None:
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path=""
    )
    await publish_runspec(bus, spec)


async def test_a_token_admits_a_process_until_it_is_revoked(
    bus: Bus, broker_url: str, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    await _published(bus)
    out = tmp_path / "hub.token"
    made = rlearner(
        "invite", "rewardhub", "--run", bus.run, "--out", str(out), "--name", "far", url=broker_url
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"{out}: rewardhub far of run {bus.run}, until ")
    assert out.stat().st_mode & 0o777 == 0o600
    assert json.loads(out.read_text())["seed"] not in made.stdout + made.stderr
    child = hub(elsewhere, "--join", str(out))
    try:
        assert f"joined run {bus.run}" in read_until(child, "joined run")
        listed = rlearner("invited", url=broker_url)
        assert f"far  rewardhub of run {bus.run}" in listed.stdout
        shown = json.loads(rlearner("invited", "--json", url=broker_url).stdout)["tokens"]
        (plain,) = [token for token in shown if token["run"] == bus.run]
        assert (plain["name"], plain["role"], plain["run"]) == ("far", "rewardhub", bus.run)
        revoked = rlearner("revoke", "far", url=broker_url)
        assert (revoked.returncode, revoked.stdout) == (
            0,
            "far: the broker refuses it from now on\n",
        )
        assert child.stderr is not None
        said = child.stderr.read()
        assert child.wait(timeout=60) == 2
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "refuses the key U" in errors[0]
        assert errors[0].endswith("it was revoked or has expired")
        assert "Traceback" not in said
    finally:
        child.kill()
        child.communicate()
    again = hub(elsewhere, "--join", str(out))
    assert "refuses the key U" in again.communicate(timeout=60)[1]
    assert again.returncode == 2


async def test_without_a_token_nobody_else_joins(
    bus: Bus, broker_url: str, elsewhere: dict[str, str]
) -> None:
    await _published(bus)
    child = hub(elsewhere, "--broker", broker_url, "--run", bus.run)
    said = child.communicate(timeout=60)[1]
    assert child.returncode == 2
    assert said.splitlines()[-1] == (
        f"error: the broker at {broker_url} requires a login: it was started by another user or on another host; ask "
        "for a join token (rlearner invite) and pass it with --join; for your own cluster see docs/cluster.md"
    )


async def test_a_supervised_broker_ends_a_token_that_expires_unless_it_is_renewed(
    tmp_path: Path,
) -> None:
    with BrokerServer(str(tmp_path / "store")) as server:
        supervisor, keys = ServerSupervisor(server), keys_of(server.url)
        assert supervisor.look() == []
        made = tokens.make_join_token(
            keys, server.url, "envhub", "demo", name="host-2", expires_s=LONG_S
        )
        bus = await Bus.connect(
            server.url, "demo", name="x", role="envhub", login=made.login, deadline_s=60
        )
        lost: list[str] = []
        bus.link.on_disconnect.add(lambda: lost.append("connection"))
        said = rlearner("renew", "host-2", "--expires", "7d", url=server.url)
        assert said.stdout.startswith("host-2: the broker accepts it until 20")
        (expires_at,) = (user.expires_at for user in keys.users() if user.name)
        assert made.expires_at + 6 * 86_400 < expires_at < made.expires_at + 8 * 86_400
        await bus.link.overdue(1.0)
        assert (lost, bus.link.refused.done()) == ([], False)
        keys.renew("host-2", time.time() - 1)
        assert supervisor.look() == []
        async with asyncio.timeout(LONG_S):
            assert "it was revoked or has expired" in str(await bus.link.refused)
        await bus.close()
        # an expired one is accepted again, by the file that it has
        keys.renew("host-2", time.time() + 600)
        tokens.write_token(made, tmp_path / "hub.token")
        login = tokens.read_token(str(tmp_path / "hub.token"), "envhub").login
        await (
            await Bus.connect(
                server.url, "demo", name="y", role="envhub", login=login, deadline_s=60
            )
        ).close()
        said = rlearner("renew", "host-3", url=server.url)
        assert (said.returncode, said.stderr) == (
            2,
            "error: the broker has no token 'host-3'; there is host-2\n",
        )


def test_status_warns_a_day_ahead() -> None:
    users = [
        BrokerUser("U1", "envhub", "demo", "soon", 1000.0 + 3 * 3600),
        BrokerUser("U2", "envhub", "demo", "later", 1000.0 + 25 * 3600),
        BrokerUser("U3", "envhub", "demo", "never", 0.0),
        BrokerUser("U4", "envhub", "other", "elsewhere", 1060.0),
        BrokerUser("U5", "learner", "demo"),
    ]
    assert expiring_tokens(users, "demo", 1000.0) == [
        "token soon (envhub) expires in 3.0 h, and its processes end then; rlearner renew soon prolongs it"
    ]


def test_a_token_that_expires_is_no_longer_rendered(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    made = tokens.make_join_token(keys, "nats://x:1", "envhub", "demo", expires_s=0.2)
    text = keys.path / "authorization.conf"
    public = made.login.key.public if made.login.key else ""
    assert public in text.read_text()
    time.sleep(0.3)
    keys.refresh()
    assert public not in text.read_text()
    assert keys.users() == []


def token_file(folder: Path, text: str, mode: int = 0o600) -> str:
    file = folder / "a.token"
    file.write_text(text)
    file.chmod(mode)
    return str(file)


def good(**changes: Any) -> str:
    key = tokens.Key.generate()
    fields = {
        "broker": "nats://x:1",
        "run": "demo",
        "role": "envhub",
        "name": "n",
        "expires_at": 0.0,
    }
    return json.dumps(
        fields
        | {"owner": key.public, "certificate": "", "authority": "", "seed": key.seed}
        | changes
    )


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "this is not a token that `rlearner invite` wrote"),
        ("[" * 10_000, 0o600, "this is not a token that `rlearner invite` wrote"),
        ("x" * 20_000, 0o600, "this is not a token that `rlearner invite` wrote"),
        (good(expires_at="never"), 0o600, "this is not a token that `rlearner invite` wrote"),
        (
            good(seed="SUAAA"),
            0o600,
            "holds no key; expected the seed of a NATS user (it begins with SU)",
        ),
        (good(role="rewardhub"), 0o600, "this token is for rewardhub n, not for envhub"),
        (good(), 0o644, "other users can read this file; run chmod 600 "),
    ],
    ids=[
        "empty",
        "nested",
        "large",
        "a wrong type",
        "no key",
        "another role",
        "readable by others",
    ],
)
def test_a_bad_token_is_refused_in_one_line(
    text: str, mode: int, says: str, tmp_path: Path
) -> None:
    place = token_file(tmp_path, text, mode)
    with pytest.raises(UserError) as caught:
        tokens.read_token(place, "envhub")
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--join {place}")
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize(
    ("owner", "mode", "accepted"), [(0, 0o440, True), (0, 0o460, False), (1000, 0o440, False)]
)
def test_a_group_may_read_a_token_of_root_as_kubernetes_mounts_it(
    owner: int, mode: int, accepted: bool, tmp_path: Path
) -> None:
    place = token_file(tmp_path, good(), mode)
    os.chown(place, owner, 1000)
    if accepted:
        assert tokens.read_token(place, "envhub").run == "demo"
    else:
        with pytest.raises(UserError, match="other users can read this file"):
            tokens.read_token(place, "envhub")


def test_a_good_token_is_read(tmp_path: Path) -> None:
    made = tokens.read_token(token_file(tmp_path, good()), "envhub")
    assert (made.broker, made.run, made.role, made.login.inbox) == (
        "nats://x:1", "demo", "envhub", "_INBOX.envhub.demo.n",
    )  # fmt: skip
    assert made.seed not in repr(made) + repr(made.login)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["invite", "envhub", "--run", "demo", "--out", "/nowhere/x"], "--out /nowhere/x: No such file or directory"),
        (["invite", "envhub", "--run", "a.b", "--out", "x"], "error: --run: 'a.b' is not allowed; use 1-64 letters"),
        (["invite", "learner", "--run", "demo", "--out", "x"], "invalid choice: 'learner'"),
        (["invite", "envhub", "--run", "demo", "--out", "x", "--expires", "soon"], "s, m, h or d, for example 24h"),
        (["revoke", "no-such-token"], "error: the broker has no token 'no-such-token'; there is "),
    ],
    ids=["no folder", "a wrong run", "a wrong role", "a wrong time", "an unknown token"],
)  # fmt: skip
def test_a_bad_command_line_is_refused_in_one_line(
    arguments: list[str], says: str, broker_url: str
) -> None:
    before = keys_of(broker_url).users()
    done = rlearner(*arguments, url=broker_url)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert keys_of(broker_url).users() == before


def test_the_name_of_a_token_is_unique(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    tokens.make_join_token(keys, "nats://x:1", "envhub", "demo", name="a", expires_s=60)
    with pytest.raises(
        UserError,
        match="--name a: the broker already has a token of this name; `rlearner revoke a`",
    ):
        tokens.make_join_token(keys, "nats://x:1", "rollout", "demo", name="a", expires_s=60)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1s", 1), ("30m", 1800), ("24h", 86_400), ("7d", 604_800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert tokens.parse_duration(text) == seconds


def test_commands_for_keys_need_the_broker_of_this_user(tmp_path: Path) -> None:
    done = rlearner("invited", url="nats://127.0.0.1:9")
    assert done.returncode == 2
    assert done.stderr == (
        "error: no keys of a broker at nats://127.0.0.1:9 on this machine; run this on the machine where it was "
        "started, as the same user; for your own cluster, set RL_BROKER_KEYS\n"
    )


def test_the_folder_of_keys_is_refused_if_others_can_enter(tmp_path: Path, broker_url: str) -> None:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o755)
    with pytest.raises(
        UserError,
        match=f"the folder of keys {folder} must belong to you alone; run chmod 700 {folder}",
    ):
        KeyFolder(folder)
    assert find_login("nats://127.0.0.1:9", "envhub", "demo").key is None


async def test_code_of_a_run_is_loaded_only_for_a_trusted_owner(
    bus: Bus, broker_url: str, tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    out, loaded = tmp_path / "hub.token", tmp_path / "loaded"
    reward = tmp_path / "mine.py"
    reward.write_text(f"open({str(loaded)!r}, 'w').close()\ndef score(sample): return 1.0\n")
    config = load("configs/quickstart.yaml", [f"domains.lake.rewards=[{{name: {reward}:score}}]"])
    spec = wire.RunSpec(
        run=bus.run, wire_version=wire.WIRE_VERSION, epoch=1, config=validate(config), model_path=""
    )
    await publish_runspec(bus, spec)
    loaded.unlink()  # by the validation
    made = rlearner("invite", "rewardhub", "--run", bus.run, "--out", str(out), url=broker_url)
    assert made.returncode == 0, made.stderr
    refused = hub(elsewhere, "--join", str(out))
    said = refused.communicate(timeout=60)[1]
    assert refused.returncode == 2
    assert said.splitlines()[-1] == (
        f"error: run {bus.run} runs code of its own or weakens isolation (domains.lake.rewards.0.name); add "
        "--trust-run-code once if you trust its owner with this account"
    )
    assert not loaded.exists()
    for options in (["--trust-run-code"], []):
        joined = hub(elsewhere, "--join", str(out), *options)
        try:
            assert f"joined run {bus.run}" in read_until(joined, "joined run")
        finally:
            joined.kill()
            joined.communicate()
    judge = (
        "{name: judge, args: {base_url: 'http://127.0.0.1:9/v1', api_key: {file: /etc/hostname}}}"
    )
    config = validate(load("configs/quickstart.yaml", [f"domains.lake.rewards=[{judge}]"]))
    await publish_runspec(bus, msgspec.structs.replace(spec, config=config))
    thief = hub(elsewhere, "--join", str(out))
    assert thief.communicate(timeout=60)[1].splitlines()[-1] == (
        f"error: run {bus.run} wants secrets of this host (domains.lake.rewards.0.args.api_key: /etc/hostname for "
        "http://127.0.0.1:9/v1); --allow-secret NAME=HOST allows one"
    )
    assert thief.returncode == 2
    joined = hub(elsewhere, "--join", str(out), "--allow-secret", "/etc/hostname=127.0.0.1")
    try:
        assert f"joined run {bus.run}" in read_until(joined, "joined run")
    finally:
        joined.kill()
        joined.communicate()
    alone = hub(elsewhere, "--broker", broker_url, "--run", bus.run, "--trust-run-code")
    assert alone.communicate(timeout=60)[1] == (
        "error: --trust-run-code goes with --join; runs of this machine's own user are trusted\n"
    )
    assert alone.returncode == 2
