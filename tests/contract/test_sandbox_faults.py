"""Providers of sandboxes that are killed, abused or disagree with their users."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest
import sandbox_kit

from rlearner_sandbox.hub.sessions import HubFull, Sessions
from rlearner_sandbox.providers.base import SandboxError, SandboxSpec
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider
from rlearner_sandbox.providers.registry import make_provider
from rlearner_sandbox.providers.remote import RemoteProvider


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[NamespaceProvider]:
    async with sandbox_kit.open_provider("namespace", tmp_path) as opened:
        assert isinstance(opened, NamespaceProvider)
        yield opened


async def test_policy_cannot_end_its_sandbox(provider: NamespaceProvider) -> None:
    sandbox = await provider.start(SandboxSpec())
    await sandbox.run_command("sleep 3231 & echo kept > file")
    killing = "import os, signal; os.kill(-1, signal.SIGKILL)"
    for command in (f"python3 -c '{killing}'; echo on", "kill -9 1; kill -INT 1; kill -TERM 1"):
        await sandbox.run_command(command, timeout_s=20)
    result = await sandbox.run_command("cat file; cat /proc/[0-9]*/cmdline")
    assert result.stdout.startswith(b"kept\n")
    assert b"3231" not in result.stdout.replace(b"\0", b" ").split(b"kept\n")[1]
    await sandbox.stop()


async def test_killed_warden_is_an_outage_and_the_next_start_works(
    provider: NamespaceProvider,
) -> None:
    sandbox = await provider.start(SandboxSpec())
    running = asyncio.ensure_future(sandbox.run_command("echo up; sleep 3233"))
    warden = psutil.Process(provider.link.pid)
    while not any("3233" in " ".join(child.cmdline()) for child in _children(warden)):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    family = _children(warden)
    warden.kill()
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError):
        await sandbox.run_command("true")
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    other = await provider.start(SandboxSpec())
    assert (await other.run_command("echo ok")).stdout == b"ok\n"
    await other.stop()
    await sandbox.stop()


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


async def test_killed_first_process_is_an_outage_of_its_sandbox_alone(
    provider: NamespaceProvider,
) -> None:
    sandbox = await provider.start(SandboxSpec())
    warden = psutil.Process(provider.link.pid)
    [first] = warden.children()
    other = await provider.start(SandboxSpec())
    first.kill()
    await asyncio.wait_for(sandbox._ended.wait(), 20)
    with pytest.raises(SandboxError, match="the sandbox has ended"):
        await sandbox.run_command("true")
    assert (await other.run_command("echo ok")).stdout == b"ok\n"
    await sandbox.stop()
    await other.stop()


USER = """import asyncio, sys
from pathlib import Path
from typing import Literal
from rlearner_sandbox.providers import SandboxSpec
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider

async def main():
    provider = NamespaceProvider(Path(sys.argv[1]))
    sandbox = await provider.start(SandboxSpec())
    await sandbox.run_command("echo data > file; mkdir d; chmod 0 d; (setsid sleep 3237 &)")
    await sandbox.snapshot()
    print("up", flush=True)
    await sandbox.run_command("sleep 3237", timeout_s=1000)

asyncio.run(main())
"""


async def test_killed_hub_leaves_nothing_behind(provider: NamespaceProvider) -> None:
    folder = provider.state
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", USER, str(folder)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    assert len(list((folder / "live").iterdir())) == 2
    later = NamespaceProvider(folder)
    sandbox = await later.start(SandboxSpec())
    assert len(list((folder / "live").iterdir())) == 2
    await sandbox.stop()
    await later.close()
    assert len(list((folder / "live").iterdir())) == 1


async def test_memory_of_all_processes_is_bounded(provider: NamespaceProvider) -> None:
    sandbox = await provider.start(SandboxSpec(memory_mib=200))
    eat = "import time; kept = bytearray(150 << 20); print('ate', flush=True); time.sleep({})"
    result = await sandbox.run_command(["python3", "-c", eat.format(0)])
    assert result.stdout == b"ate\n"
    both = " & ".join(f'python3 -c "{eat.format(60)}"' for _ in range(2))
    result = await sandbox.run_command(f"{both} & wait %1; wait %2; echo over", timeout_s=50)
    assert result.stdout.startswith(b"ate")
    assert (await sandbox.run_command("echo alive")).stdout == b"alive\n"
    await sandbox.stop()


async def test_processes_are_bounded(provider: NamespaceProvider) -> None:
    sandbox = await provider.start(SandboxSpec(processes=20))
    result = await sandbox.run_command("for i in $(seq 60); do sleep 30 & done", timeout_s=30)
    assert b"ork" in result.stderr
    listed = await sandbox.run_command("ls -d /proc/[0-9]* | wc -l")
    if listed.exit_code == 0 and listed.stdout:
        assert int(listed.stdout) <= 22
    await sandbox.reset()
    assert (await sandbox.run_command("echo fine")).stdout == b"fine\n"
    await sandbox.stop()


async def test_what_is_written_is_bounded(provider: NamespaceProvider) -> None:
    sandbox = await provider.start(SandboxSpec(disk_mib=8))
    result = await sandbox.run_command("head -c 20000000 /dev/zero > large")
    assert result.exit_code != 0
    many = "rm large; i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > $i; sleep 0.02; done"
    result = await sandbox.run_command(many, timeout_s=60)
    assert not result.timed_out
    assert result.exit_code == 137
    assert b"more than 8 MiB written" in result.stderr
    await sandbox.stop()


async def test_endpoint_is_reachable_and_nothing_else(provider: NamespaceProvider) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"said " + await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    closed = await asyncio.start_server(answer, "127.0.0.1", 0)
    port, other = (each.sockets[0].getsockname()[1] for each in (server, closed))
    ask = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10)\n"
        "s.sendall(b'hello\\n'); print(s.recv(100).decode(), end='')"
    )
    spec = SandboxSpec(network="endpoint", endpoint=f"http://127.0.0.1:{port}")
    sandbox = await provider.start(spec)
    for _ in range(2):
        result = await sandbox.run_command(["python3", "-c", ask, str(port)])
        assert result.stdout == b"said hello\n", result
        refused = await sandbox.run_command(["python3", "-c", ask, str(other)])
        assert b"ConnectionRefused" in refused.stderr
        await sandbox.reset()
    alone = await provider.start(SandboxSpec())
    assert (await alone.run_command(["python3", "-c", ask, str(port)])).exit_code == 1
    for each in (sandbox, alone):
        await each.stop()
    server.close()
    closed.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SandboxSpec(network="endpoint"), "endpoint: None is not allowed"),
        (SandboxSpec(network="endpoint", endpoint="http://example.com"), "with an IP address"),
        (SandboxSpec(workdir="work"), "an absolute path"),
        (SandboxSpec(image="debian:13"), "is not a folder of this host"),
    ],
)
async def test_bad_spec_is_refused(
    provider: NamespaceProvider, spec: SandboxSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await provider.start(spec)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_image_has_its_users_and_owners(provider: NamespaceProvider, tmp_path: Path) -> None:
    root = sandbox_kit.busybox_root(tmp_path / "root")
    (root / "home" / "own").write_text("mine")
    os.chown(root / "home" / "own", 1000, 1000)
    (root / "etc" / "secret").write_text("hidden")
    (root / "etc" / "secret").chmod(0o600)
    sandbox = await provider.start(SandboxSpec(image=str(root), user="agent"))
    result = await sandbox.run_command("id; stat -c %U /home/own /etc/secret; cat /etc/secret")
    text = result.stdout.decode()
    assert "uid=1000(agent) gid=1000(agent) groups=7(extra)" in text.replace(",1000(agent)", "")
    assert "agent\nroot\n" in text
    assert b"Permission denied" in result.stderr
    result = await sandbox.run_command("chown 0 /home/own; cat /etc/secret", user="root")
    assert result.stdout == b"hidden"
    assert (root / "home" / "own").stat().st_uid == 1000
    unknown = await sandbox.run_command("true", user="nobody-here")
    assert unknown.exit_code == 126
    assert b"there is no user 'nobody-here'" in unknown.stderr
    await sandbox.stop()


async def test_hub_refuses_strangers_and_folders(tmp_path: Path) -> None:
    async with sandbox_kit.open_hub(tmp_path, "--n", "1") as (url, token):
        stranger = RemoteProvider(url, "x" * 32)
        with pytest.raises(SandboxError, match="the token is not the one"):
            await stranger.start(SandboxSpec())
        await stranger.close()
        client = RemoteProvider(url, token)
        with pytest.raises(ValueError, match="not allowed by this hub"):
            await client.start(SandboxSpec(image="/"))
        with pytest.raises(ValueError, match="not allowed by this hub"):
            await client.start(SandboxSpec(network="host"))
        with pytest.raises(ValueError, match="limits are positive"):
            await client.start(SandboxSpec(memory_mib=-1))
        sandbox = await client.start(SandboxSpec())
        with pytest.raises(SandboxError, match="the hub has 1 sandboxes"):
            await client.start(SandboxSpec())
        other = RemoteProvider(url, token)
        theirs = type(sandbox)(other, other._hubs[0], sandbox._path.rpartition("/")[2])
        with pytest.raises(SandboxError, match="no such sandbox"):
            await theirs.run_command("true")
        await other.close()
        await client.close()


async def test_killed_hub_process_is_an_outage_and_another_hub_serves(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text("t" * 40)
    first = await sandbox_kit.start_hub(tmp_path, file)
    second = await sandbox_kit.start_hub(tmp_path, file)
    try:
        urls = []
        for process in (first, second):
            assert process.stdout is not None
            urls.append((await process.stdout.readline()).decode().split()[-1])
        client = RemoteProvider(urls, "t" * 40)
        sandbox = await client.start(SandboxSpec())
        said = asyncio.Event()
        running = asyncio.ensure_future(
            sandbox.run_command("echo up; sleep 3239", on_output=lambda *_: said.set())
        )
        await asyncio.wait_for(said.wait(), 60)
        family = psutil.Process(first.pid).children(recursive=True)
        first.kill()
        with pytest.raises(SandboxError, match="cannot be reached"):
            await running
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        replacement = await client.start(SandboxSpec())
        assert (await replacement.run_command("echo ok")).stdout == b"ok\n"
        await sandbox.stop()
        await client.close()
    finally:
        for process in (first, second):
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def test_silent_client_loses_its_sandboxes(provider: NamespaceProvider) -> None:
    clock = [0.0]
    sessions = Sessions(provider, 2, session_s=60.0, clock=lambda: clock[0])
    sessions.note_sign("alive")
    sessions.note_sign("silent")
    kept = await sessions.start("alive", SandboxSpec())
    lost = await sessions.start("silent", SandboxSpec())
    with pytest.raises(HubFull):
        await sessions.start("alive", SandboxSpec())
    clock[0] = 50.0
    sessions.note_sign("alive")
    assert await sessions.end_silent() == 0
    clock[0] = 61.0
    assert await sessions.end_silent() == 1
    with pytest.raises(KeyError):
        sessions.find("silent", lost)
    assert (await sessions.find("alive", kept).run_command("true")).exit_code == 0
    await sessions.end_session("alive")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lxc", {}, "provider: 'lxc' is not allowed; one of namespace"),
        ("namespace", {"layers": 1}, "provider namespace: .*layers"),
        ("namespace", {"layering": "zfs"}, "layering: 'zfs' is not allowed"),
        ("podman", {"tool": "no-such-tool"}, "there is no no-such-tool on PATH"),
        ("remote", {"url": "ftp://x", "token": "t"}, "url: 'ftp://x' is not allowed"),
        ("remote", {"url": "http://10.1.2.3:1", "token": "t"}, "in clear to another host"),
        ("remote", {"url": [], "token": "t"}, "at least one address"),
        ("remote", {"url": "http://127.0.0.1:1"}, "token: none is given"),
    ],
)
def test_bad_arguments_are_refused(
    name: str, arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RL_SANDBOXHUB_TOKEN", raising=False)
    with pytest.raises(ValueError, match=message):
        make_provider(name, arguments)


async def test_unreachable_hub_is_an_outage() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = RemoteProvider(f"http://127.0.0.1:{port}", "t" * 20)
    for _ in range(3):
        with pytest.raises(SandboxError, match="cannot be reached"):
            await client.start(SandboxSpec())
    with pytest.raises(SandboxError, match="failed 3 times in a row"):
        await client.start(SandboxSpec())
    await client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("layering", ["overlay", "copy"])
async def test_other_users_read_the_hosts_system_whatever_the_umask(
    tmp_path: Path, layering: Literal["overlay", "copy"]
) -> None:
    former = os.umask(0o077)
    try:
        provider = NamespaceProvider(tmp_path / "state", layering)
        sandbox = await provider.start(SandboxSpec(user="nobody"))
        await sandbox.upload(Path(__file__), "/opt/new/deep/file")
        result = await sandbox.run_command("id -un; ls -d /etc/passwd; cat /etc/hosts; echo 1 > x")
        assert result.stdout.startswith(b"nobody\n/etc/passwd\n127.0.0.1")
        assert b"denied" in result.stderr
        result = await sandbox.run_command("stat -c %a / /work /opt/new /opt/new/deep", user="root")
        assert result.stdout.split() == [b"755"] * 4
        await provider.close()
    finally:
        os.umask(former)
