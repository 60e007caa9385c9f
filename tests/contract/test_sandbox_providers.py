"""Every provider of sandboxes keeps one contract."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sandbox_kit

from rlearner_sandbox.providers.base import (
    EpisodeSandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
)

PROVIDERS = ["namespace", "copy", "remote", "podman"]


@pytest.fixture(params=PROVIDERS)
async def provider(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[SandboxProvider]:
    async with sandbox_kit.open_provider(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture
async def sandbox(provider: SandboxProvider) -> AsyncIterator[EpisodeSandbox]:
    started = await provider.start(sandbox_kit.spec_for(provider, env={"COLOUR": "red"}))
    yield started
    await started.stop()


async def text_of(sandbox: EpisodeSandbox, command: str) -> str:
    result = await sandbox.run_command(command)
    assert result.exit_code == 0, result
    return result.stdout.decode().strip()


async def test_command_streams_environment_and_exit_code(sandbox: EpisodeSandbox) -> None:
    pieces: list[tuple[str, bytes]] = []
    result = await sandbox.run_command(
        'echo "$COLOUR $SIZE"; cat; pwd >&2; exit 7',
        env={"SIZE": "large"},
        stdin=b"from outside\n",
        on_output=lambda stream, data: pieces.append((stream, data)),
    )
    assert result.exit_code == 7
    assert result.stdout == b"red large\nfrom outside\n"
    assert result.stderr == b"/work\n"
    assert not result.is_truncated
    assert not result.timed_out
    assert b"".join(data for stream, data in pieces if stream == "stdout") == result.stdout


async def test_arguments_are_not_words_of_a_shell(sandbox: EpisodeSandbox) -> None:
    result = await sandbox.run_command(["echo", "$COLOUR; a  b"], workdir="/tmp")
    assert result.stdout == b"$COLOUR; a  b\n"


async def test_long_output_is_cut_and_read_to_its_end(sandbox: EpisodeSandbox) -> None:
    result = await sandbox.run_command("yes | head -c 300000; echo end >&2", max_output=1000)
    assert result.is_truncated
    assert len(result.stdout) == 1000
    assert result.stderr == b"end\n"
    assert result.exit_code == 0


async def test_timeout_ends_the_command_and_its_children(sandbox: EpisodeSandbox) -> None:
    began = time.monotonic()
    result = await sandbox.run_command("sleep 3217 & sleep 3217", timeout_s=1.0)
    assert result.timed_out
    assert result.exit_code == 124
    assert time.monotonic() - began < 60
    left = await text_of(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "3217" not in left.replace("tr", "")


async def test_daemon_outlives_its_command(sandbox: EpisodeSandbox) -> None:
    await sandbox.run_command("(while :; do echo tick; sleep 0.05; done) & sleep 0.1")
    await sandbox.run_command("rm -f seen; (while :; do echo x > seen; sleep 0.05; done) &")
    for _ in range(200):
        result = await sandbox.run_command("ls seen")
        if result.exit_code == 0:
            break
    assert result.exit_code == 0


async def test_missing_program_is_the_commands_failure(sandbox: EpisodeSandbox) -> None:
    result = await sandbox.run_command(["no-such-program"])
    assert result.exit_code in (126, 127)


async def test_files_and_folders_go_in_and_out(sandbox: EpisodeSandbox, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "file").write_bytes(bytes(range(256)) * 100)
    (folder / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("run.sh")
    os.mkfifo(folder / "pipe")
    await sandbox.upload(folder, "/work/copy")
    assert await text_of(sandbox, "./copy/run.sh; readlink copy/link || ls -l copy/link") != ""
    assert (await sandbox.run_command("ls copy/pipe")).exit_code != 0
    await sandbox.download("/work/copy", tmp_path / "out")
    assert (tmp_path / "out" / "deep" / "file").read_bytes() == bytes(range(256)) * 100
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["deep", "run.sh"]
    await sandbox.upload(folder / "run.sh", "/work/other.sh")
    await sandbox.download("/work/other.sh", tmp_path / "single")
    assert (tmp_path / "single").read_text() == "#!/bin/sh\necho ran\n"


async def test_upload_follows_no_link_out(sandbox: EpisodeSandbox, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    source = tmp_path / "source"
    source.write_text("new")
    await sandbox.run_command(["ln", "-s", str(tmp_path), "/work/away"])
    with contextlib.suppress(SandboxError, OSError):
        await sandbox.upload(source, "/work/away/victim")
    assert victim.read_text() == "untouched"


async def test_download_follows_no_link_out(sandbox: EpisodeSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    links = f"ln -s {tmp_path} d/away; ln -s {secret} d/file"
    await sandbox.run_command(f"mkdir d; {links}; echo 1 > d/a")
    await sandbox.download("/work/d", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError):
        await sandbox.download("/work/d/file", tmp_path / "single")
    with pytest.raises(FileNotFoundError):
        await sandbox.download("/work/none", tmp_path / "none")


async def test_download_is_bounded(sandbox: EpisodeSandbox, tmp_path: Path) -> None:
    await sandbox.run_command("head -c 300000 /dev/zero > big")
    with pytest.raises(ValueError, match="at most 100000"):
        await sandbox.download("/work/big", tmp_path / "out", max_bytes=100_000)


async def test_reset_drops_files_and_processes(sandbox: EpisodeSandbox) -> None:
    await sandbox.run_command("echo data > file; sleep 3219 &")
    await sandbox.reset()
    assert await text_of(sandbox, "ls") == ""
    left = await text_of(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "3219" not in left


async def test_fork_and_snapshot_start_with_what_was_written(
    provider: SandboxProvider, sandbox: EpisodeSandbox
) -> None:
    await sandbox.run_command("echo one > file; mkdir -m 700 d; echo two > d/x; rm /etc/group")
    copy = await sandbox.fork()
    image = await sandbox.snapshot()
    await sandbox.run_command("echo changed > file")
    await copy.run_command("echo more > more")
    other = await provider.start(sandbox_kit.spec_for(provider, image=image))
    for each in (copy, other):
        assert await text_of(each, "cat file d/x") == "one\ntwo"
        assert (await each.run_command("ls /etc/group")).exit_code != 0
    await copy.reset()
    assert await text_of(copy, "ls") == "d\nfile"
    assert (await other.run_command("ls more")).exit_code != 0
    await copy.stop()
    await other.stop()


async def test_sandboxes_do_not_see_each_other(provider: SandboxProvider) -> None:
    spec = sandbox_kit.spec_for(provider)
    first, second = await asyncio.gather(provider.start(spec), provider.start(spec))
    await asyncio.gather(first.run_command("echo 1 > a"), second.run_command("echo 2 > b"))
    assert await text_of(first, "ls") == "a"
    assert await text_of(second, "ls") == "b"
    await first.stop()
    await second.stop()


async def test_stopped_sandbox_fails_and_stops_again(provider: SandboxProvider) -> None:
    started = await provider.start(sandbox_kit.spec_for(provider))
    await started.stop()
    await started.stop()
    with pytest.raises(SandboxError):
        await started.run_command("true")


async def test_missing_image_is_refused(provider: SandboxProvider) -> None:
    with pytest.raises(ValueError, match="image"):
        await provider.start(SandboxSpec(image="sha256:" + "0" * 64))


async def test_cancelled_command_is_killed(sandbox: EpisodeSandbox) -> None:
    running = asyncio.ensure_future(sandbox.run_command("echo $$ > pid; sleep 3221"))
    while (await sandbox.run_command("cat pid")).stdout.strip() == b"":
        pass
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    for _ in range(200):
        left = await sandbox.run_command("kill -0 $(cat pid)")
        if left.exit_code != 0:
            break
    assert left.exit_code != 0


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root")
def test_namespace_without_root(tmp_path: Path) -> None:
    """The contract's core as a user without privileges."""
    program = Path(__file__).resolve().parents[1] / "kit" / "sandbox_as_user.py"
    python = "/usr/bin/python3"
    is_old = "import sys; sys.exit(sys.version_info < (3, 11))"
    if subprocess.run([python, "-c", is_old]).returncode:
        pytest.skip("the system's Python is older than 3.11")
    folder = Path("/var/tmp") / f"sandboxes-{os.getpid()}"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    try:
        command = ["setpriv", "--reuid", "12345", "--regid", "12345", "--clear-groups", python]
        result = subprocess.run(
            [*command, str(program), str(folder)], capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["start", "files", "closed", "fork", "user", "empty"]
    finally:
        shutil.rmtree(folder)
