"""Opens each provider of sandboxes for tests, with a small root file system where it needs one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

import pytest

from rlearner_sandbox import NoSandbox
from rlearner_sandbox.providers.base import SandboxError, SandboxProvider, SandboxSpec
from rlearner_sandbox.providers.containers import PodmanProvider
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider
from rlearner_sandbox.providers.remote import RemoteProvider

PODMAN_IMAGE = "localhost/rlearner-test-base"
COMMANDS = [
    "sh",
    "ls",
    "cat",
    "echo",
    "mkdir",
    "rm",
    "sleep",
    "id",
    "touch",
    "head",
    "ln",
    "chmod",
    "chown",
    "stat",
    "wc",
    "true",
    "false",
    "kill",
    "setsid",
    "env",
    "mv",
    "tr",
    "cp",
    "find",
    "pwd",
    "yes",
    "dd",
    "readlink",
    "wget",
]
PASSWD = "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home:/bin/sh\n"
GROUP = "root:x:0:\nagent:x:1000:\nextra:x:7:agent\n"


def busybox_root(folder: Path) -> Path:
    """Write a root file system of busybox to a new folder; skips the test if there is none."""
    busybox = shutil.which("busybox")
    if busybox is None or b"dynamically" in _describe(busybox):
        pytest.skip("needs busybox-static")
    for name in ("bin", "etc", "tmp", "usr/bin", "root", "home"):
        (folder / name).mkdir(parents=True)
    shutil.copy(busybox, folder / "bin" / "busybox")
    for name in COMMANDS:
        (folder / "bin" / name).symlink_to("busybox")
    (folder / "etc" / "passwd").write_text(PASSWD)
    (folder / "etc" / "group").write_text(GROUP)
    (folder / "tmp").chmod(0o1777)
    return folder


def _describe(path: str) -> bytes:
    with open(path, "rb") as file:
        return b"dynamically" if b"/lib64/ld-linux" in file.read(4096) else b""


@lru_cache(maxsize=1)
def podman_image(folder: Path) -> str:
    """Put that root file system into podman's store; skips the test without podman."""
    if os.environ.get("RL_PODMAN") != "1" or shutil.which("podman") is None:
        pytest.skip("needs podman and RL_PODMAN=1, see make test-sandboxes")
    root = busybox_root(folder / "podman-root")
    packed = folder / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(packed), "."], check=True)
    result = subprocess.run(
        ["podman", "import", str(packed), PODMAN_IMAGE], capture_output=True, text=True
    )
    if result.returncode:
        pytest.skip(f"podman does not work here: {result.stderr.strip()[-200:]}")
    return PODMAN_IMAGE


def spec_for(
    provider: SandboxProvider, *, image: str | None = None, env: Mapping[str, str] | None = None
) -> SandboxSpec:
    """Return a spec that the provider can start."""
    if image is None and isinstance(provider, PodmanProvider):
        image = PODMAN_IMAGE
    return SandboxSpec(image=image, env=env or {}, memory_mib=256)


@asynccontextmanager
async def open_provider(name: str, folder: Path) -> AsyncIterator[SandboxProvider]:
    """Open a provider whose files are below ``folder``; skips the test if it does not work here."""
    if name == "remote":
        async with open_hub(folder) as (url, token):
            provider: SandboxProvider = RemoteProvider(url, token)
            yield provider
            await provider.close()
        return
    if name == "podman":
        podman_image(folder)
        provider = PodmanProvider(folder=str(folder / "state"))
    else:
        layering = "copy" if name == "copy" else "overlay"
        provider = NamespaceProvider(folder / "state", layering=layering)
        try:
            await (await provider.start(SandboxSpec())).stop()
        except (SandboxError, NoSandbox) as error:
            pytest.skip(str(error))
    yield provider
    await provider.close()
    assert list((folder / "state" / "live").iterdir()) == []


@asynccontextmanager
async def open_hub(folder: Path, *options: str) -> AsyncIterator[tuple[str, str]]:
    """Run a ``sandboxhub`` in a process of its own; yield its address and token."""
    token = uuid.uuid4().hex
    file = folder / f"token-{token}"
    file.touch(mode=0o600)
    file.write_text(token)
    process = await start_hub(folder, file, *options)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line.startswith(b"sandboxhub listens at "), line
        yield line.decode().split()[-1], token
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
    assert list((folder / "hub" / "rlearner" / "sandboxes" / "live").iterdir()) == []


async def start_hub(folder: Path, token_file: Path, *options: str) -> asyncio.subprocess.Process:
    """Start a ``sandboxhub`` whose files are below ``folder``."""
    command = ["-m", "rlearner_sandbox.hub.cli", "--port", "0", "--token-file", str(token_file)]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        *options,
        env=os.environ | {"XDG_STATE_HOME": str(folder / "hub")},
        stdout=asyncio.subprocess.PIPE,
    )
