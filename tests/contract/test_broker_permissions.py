"""What `broker permissions` prints, as the configuration of a real nats-server that the project did
not start.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from jwt_accounts import imported_account, operator_lines
from nats.aio.client import Client
from nats.aio.msg import Msg
from own_server import own_server

from broker.contract import codec, wire
from broker.contract.examples import EXAMPLES
from broker.contract.permissions import inbox_prefix
from broker.contract.streams import CONTROL, EPISODES, RUNS, SAMPLES, TICKETS, WEIGHTS
from broker.identity import cluster_login
from broker.identity.accounts import map_subject
from broker.identity.login import KEYS, find_login
from broker.jetstream.bus import Bus
from broker.settings.runspec import publish_runspec

RUN, OTHER = "quick", "other"
HUBS = ("rollout", "envhub", "rewardhub")
EVERY_ROLE = ("learner", *HUBS, "operator")


def permissions(
    *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "broker.cli", "permissions", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **(env or {})},
    )


def passwords(folder: Path) -> dict[str, str]:
    """Write a file with a password of each role and run; return the variables of the server."""
    variables = {}
    for run in (RUN, OTHER):
        for role in EVERY_ROLE:
            name = (
                "RLEARNER_OPERATOR_PASSWORD"
                if role == "operator"
                else f"RLEARNER_{run}_{role}_PASSWORD".upper()
            )
            file = folder / f"{run}.{role}.password"
            file.write_text(f"secret-of-{name}\n")
            file.chmod(0o600)
            variables[name] = f"secret-of-{name}"
    return variables


@pytest.fixture(scope="module", params=["nkey", "password", "jwt"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A server with exactly the output; yields its address and the folder of keys or passwords."""
    folder = tmp_path_factory.mktemp("own")
    login = request.param
    keys = folder / "keys"
    named = ["--keys", str(keys)] if login in ("nkey", "jwt") else []
    made = permissions("--run", RUN, "--run", OTHER, "--login", login, *named)
    assert made.returncode == 0, made.stderr
    lines = imported_accounts(made.stdout) if login == "jwt" else made.stdout
    with own_server(folder / "server", include=lines, env=passwords(folder)) as url:
        yield url, folder


def imported_accounts(commands: str) -> str:
    """Return the configuration of a server whose operator has run the commands of nsc."""
    words = [shlex.split(line, comments=True) for line in commands.splitlines()]
    *imports, push = filter(None, words)
    assert push == ["nsc", "push", "--all"]
    jwts = list[str]()
    for line in imports:
        assert line[:4] == ["nsc", "import", "account", "--file"]
        assert line[5:] == ["--overwrite", "--skip"]
        jwts.append(Path(line[4]).read_text())
    return operator_lines(dict(map(imported_account, jwts)))


def user_file(folder: Path, role: str, run: str, suffix: str) -> Path:
    name = f"operator.{suffix}" if role == "operator" else f"{run}/{role}.{suffix}"
    return folder / "keys" / name


def log_in(monkeypatch: pytest.MonkeyPatch, folder: Path, role: str, run: str = RUN) -> None:
    """Name the login of a role in the environment."""
    if (folder / "keys" / "accounts").is_dir():
        monkeypatch.setenv(cluster_login.CREDS, str(user_file(folder, role, run, "creds")))
        return
    if (folder / "keys").is_dir():
        monkeypatch.setenv(cluster_login.NKEY, str(user_file(folder, role, run, "key")))
        return
    monkeypatch.setenv(cluster_login.USER, role if role == "operator" else f"{run}.{role}")
    monkeypatch.setenv(cluster_login.PASSWORD, str(folder / f"{run}.{role}.password"))


async def connect(
    monkeypatch: pytest.MonkeyPatch, server: tuple[str, Path], role: str, run: str = RUN
) -> Bus:
    url, folder = server
    with monkeypatch.context() as environment:
        log_in(environment, folder, role, run)
        login = find_login(url, role, run)  # once, since all roles are in one process here
    return await Bus.connect(url, run, name=f"{role}-1", role=role, login=login, deadline_s=20)


@pytest.fixture
async def learner(server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    bus = await connect(monkeypatch, server, "learner")
    await bus.ensure_streams()
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    yield bus
    await bus.close()


async def test_processes_of_every_role_do_their_work(
    learner: Bus, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = wire.RunSpec(run=RUN, wire_version=wire.WIRE_VERSION, epoch=1, config={}, model_path="")
    await publish_runspec(learner, spec)
    await learner.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    await learner.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
    hub = await connect(monkeypatch, server, "envhub")
    await hub.ensure_streams()
    found = await hub.key_value(RUNS).get(RUN)
    assert found is not None
    assert isinstance(found[0], wire.RunSpec)
    async with asyncio.timeout(20):
        (taken,) = await (await hub.work_queue(TICKETS, "lake")).fetch(1, 10.0)
        await hub.publish(EPISODES, EXAMPLES[wire.Group], key="default", ticket=taken.seq)
        await taken.ack()
    assert await learner.depth(TICKETS) == {}
    rewards = await connect(monkeypatch, server, "rewardhub")
    await rewards.publish(SAMPLES, EXAMPLES[wire.Group])
    rollout = await connect(monkeypatch, server, "rollout")
    async for offer in rollout.watch_last(WEIGHTS):
        assert isinstance(offer, wire.WeightsOffer)
        break
    assert await learner.last_seq(SAMPLES) >= 1
    operator = await connect(monkeypatch, server, "operator")
    assert RUN in await operator.runs()
    for bus in (hub, rewards, rollout, operator):
        await bus.close()


async def test_a_server_replies_to_a_hub(
    learner: Bus, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = await connect(monkeypatch, server, "rollout")
    hub = await connect(monkeypatch, server, "envhub")

    async def reply(message: Msg) -> None:
        await rollout.link.send(message.reply, b"text")

    await rollout.link.subscribe(f"rl.{RUN}.generate.s1", reply)
    await rollout.link.overdue(1.0)
    assert (await hub.link.call(f"rl.{RUN}.generate.s1", b"prompt", timeout_s=5)).data == b"text"
    await hub.close()
    await rollout.close()


@pytest.mark.parametrize("role", HUBS)
async def test_a_hub_writes_neither_what_the_run_follows_nor_another_run(
    role: str, learner: Bus, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await connect(monkeypatch, server, "learner", OTHER)
    await other.ensure_streams()
    url, folder = server
    subjects = [
        *(f"rl.{RUN}.{name}" for name in ("weights", "tickets.lake")),
        *(f"$KV.rl_{RUN}_{bucket}.{RUN}" for bucket in ("runs", "control")),
        *(
            f"rl.{OTHER}.{name}"
            for name in ("samples", "episodes.default.tickets-1", "dead.tickets")
        ),
        f"$JS.API.STREAM.DELETE.{SAMPLES.stream_name(RUN)}",
        f"$JS.API.STREAM.PURGE.{TICKETS.stream_name(OTHER)}",
    ]
    before = [
        await bus.last_seq(stream)
        for bus in (learner, other)
        for stream in (WEIGHTS, RUNS, CONTROL, SAMPLES)
    ]
    refused: list[str] = []

    async def note(error: Exception) -> None:
        refused.append(str(error))

    if (folder / "keys" / "accounts").is_dir():
        shown: dict[str, Any] = {"user_credentials": str(user_file(folder, role, RUN, "creds"))}
    elif (folder / "keys").is_dir():
        shown = {"nkeys_seed": str(user_file(folder, role, RUN, "key"))}
    else:
        password = (folder / f"{RUN}.{role}.password").read_text().strip()
        shown = {"user": f"{RUN}.{role}", "password": password}
    client = Client()
    await client.connect(
        url, error_cb=note, allow_reconnect=False, inbox_prefix=inbox_prefix(role, RUN, ""), **shown
    )
    for subject in subjects:
        await client.publish(subject, codec.encode(wire.DesiredState(state="stopped")))
    await client.flush()
    await asyncio.sleep(0.1)
    assert [line.split('"')[1] for line in refused] == [
        map_subject(one).lower() for one in subjects
    ]
    await client.subscribe(f"rl.{OTHER}.>")
    await client.flush()
    await asyncio.sleep(0.1)
    assert "permissions violation for subscription" in refused[-1].lower()
    await client.close()
    after = [
        await bus.last_seq(stream)
        for bus in (learner, other)
        for stream in (WEIGHTS, RUNS, CONTROL, SAMPLES)
    ]
    assert after == before
    await other.close()


async def test_nobody_connects_without_a_login(server: tuple[str, Path]) -> None:
    async def ignore(_: Exception) -> None:
        """Reported by the exception."""

    client = Client()
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await client.connect(server[0], allow_reconnect=False, error_cb=ignore)
    await client.close()


# -------------------------------------------------------------------------------------------------------
# the command


def test_seeds_stay_in_the_folder(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    made = permissions("--run", RUN, env={KEYS: str(keys)})
    files = sorted(keys.rglob("*.key"))
    assert [str(file.relative_to(keys)) for file in files] == [
        "operator.key",
        *(
            f"{RUN}/{role}.key"
            for role in ("envhub", "learner", "observer", "owner", "rewardhub", "rollout")
        ),
    ]
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text().strip() not in made.stdout + made.stderr
    assert permissions("--run", RUN, "--keys", str(keys)).stdout == made.stdout
    assert made.stdout.count("nkey:") == 6


def test_the_accounts_of_an_operator_stay_the_same(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    arguments = ["--login", "jwt", "--keys", str(keys)]
    made = permissions("--run", RUN, *arguments)
    names = {file.stem for file in (keys / "accounts").glob("*.jwt")}
    roles = (*HUBS, "observer")
    assert names == {"RLEARNER", "RLEARNER_RELAY", *(f"RLEARNER_{RUN}_{role}" for role in roles)}
    accounts = dict(
        imported_account(file.read_text()) for file in (keys / "accounts").glob("*.jwt")
    )
    for file in keys.rglob("*"):
        assert file.stat().st_mode & 0o77 == 0
        if file.suffix in (".nk", ".key"):
            assert file.read_text().strip() not in made.stdout + made.stderr
    assert permissions("--run", RUN, *arguments).stdout == made.stdout
    again = dict(imported_account(file.read_text()) for file in (keys / "accounts").glob("*.jwt"))
    assert again == accounts


def test_only_the_runs_and_roles_that_are_named(tmp_path: Path) -> None:
    keys = ["--keys", str(tmp_path / "keys")]
    permissions("--run", OTHER, *keys)
    made = permissions("--run", RUN, "--role", "envhub", "rewardhub", *keys).stdout
    assert [line.strip() for line in made.splitlines() if line.strip().startswith("#")][2:] == [
        f"# envhub {RUN}",
        f"# rewardhub {RUN}",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--run", RUN], "error: --login nkey needs --keys FOLDER (or RL_BROKER_KEYS)"),
        (["--run", RUN, "--login", "jwt"], "error: --login jwt needs --keys FOLDER"),
        (["--run", "a b", "--login", "password"], "error: --run: 'a b' is not allowed"),
        (
            ["--run", "a-b", "--run", "a_b", "--login", "password"],
            "would share $RLEARNER_A_B_LEARNER_PASSWORD",
        ),
        (["--run", RUN, "--role", "king"], "invalid choice: 'king'"),
        (["--run", RUN, "--keys", "/proc/none"], "error: cannot use the folder of keys /proc/none"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], says: str) -> None:
    made = permissions(*arguments)
    assert made.returncode == 2
    assert says in made.stderr
    assert made.stdout == ""
    assert len(made.stderr.splitlines()) == 1
