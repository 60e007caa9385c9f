"""Uses the provider ``namespace`` as a user without privileges; argument: an empty folder.

Run by the system's Python, which has no packages.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlearner_sandbox.providers import SandboxSpec
from rlearner_sandbox.providers.namespace.provider import NamespaceProvider


async def main(folder: Path) -> None:
    provider = NamespaceProvider(folder / "state")
    sandbox = await provider.start(SandboxSpec())
    result = await sandbox.run_command("id -u; echo data > file; mkdir d; echo x > d/y; chmod 0 d")
    assert result.stdout == b"0\n", result
    print("start")
    await sandbox.upload(folder / "state", "/work/in")
    await sandbox.download("/work/file", folder / "out")
    assert (folder / "out").read_text() == "data\n"
    print("files")
    result = await sandbox.run_command(
        f"ls {Path(__file__).parent} {folder}; cat /etc/shadow; touch /usr/x; mount -t tmpfs x /tmp"
    )
    assert result.exit_code != 0
    assert not result.stdout, result
    print("closed")
    copy = await sandbox.fork()
    result = await copy.run_command("cat file d/y; stat -c %a d")
    assert result.stdout == b"data\nx\n0\n", result
    print("fork")
    try:
        await provider.start(SandboxSpec(user="agent"))
    except ValueError as error:
        print("user" if "user root alone" in str(error) else error)
    await provider.close()
    assert not list((folder / "state" / "live").iterdir())
    print("empty")


asyncio.run(main(Path(sys.argv[1])))
