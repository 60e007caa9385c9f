"""A provider of sandboxes for tests of what stands above it: each is a folder, bound by bubblewrap.

It can be told to fail, as a provider whose daemon was killed does.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path

from rlearner_sandbox.providers.base import ExecResult, OnOutput, SandboxError, SandboxSpec

SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")
_numbers = count()


class FolderProvider:
    """Starts sandboxes; ``fails_after`` commands every call fails."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="folder-sandbox-"))
        self.commands_left = fails_after
        self.living: set[FolderSandbox] = set()
        self.starts = 0

    async def start(self, spec: SandboxSpec) -> FolderSandbox:
        self.count_call()
        self.starts += 1
        folder = self.root / str(next(_numbers))
        folder.mkdir()
        if spec.image is not None:
            shutil.copytree(self.root / spec.image, folder, symlinks=True, dirs_exist_ok=True)
        (folder / spec.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
        sandbox = FolderSandbox(self, folder, spec)
        self.living.add(sandbox)
        return sandbox

    def count_call(self) -> None:
        if self.commands_left is None:
            return
        self.commands_left -= 1
        if self.commands_left < 0:
            raise SandboxError("the daemon of the sandboxes is gone")

    async def close(self) -> None:
        for sandbox in list(self.living):
            await sandbox.stop()
        shutil.rmtree(self.root, ignore_errors=True)


class FolderSandbox:
    def __init__(self, provider: FolderProvider, folder: Path, spec: SandboxSpec) -> None:
        self.provider = provider
        self.folder = folder
        self.spec = spec
        self.groups: list[int] = []

    async def run_command(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        timeout_s: float = 60.0,
        stdin: bytes = b"",
        max_output: int = 1 << 20,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        self.provider.count_call()
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        return await asyncio.to_thread(
            self._run, words, workdir or self.spec.workdir, {**self.spec.env, **(env or {})},
            timeout_s=timeout_s, stdin=stdin, max_output=max_output,
        )  # fmt: skip

    def _run(
        self,
        words: list[str],
        workdir: str,
        env: dict[str, str],
        *,
        timeout_s: float,
        stdin: bytes,
        max_output: int,
    ) -> ExecResult:
        bound = [
            part
            for path in sorted(self.folder.iterdir())
            if f"/{path.name}" not in SYSTEM
            for part in ("--bind", str(path), f"/{path.name}")
        ]
        for path in SYSTEM:
            if os.path.islink(path):
                bound += ["--symlink", os.readlink(path), path]
            elif os.path.isdir(path):
                bound += ["--ro-bind", path, path]
        for name in ("tmp", "tests", "logs", "solution", "root", "app"):
            if not (self.folder / name).exists():
                (self.folder / name).mkdir()
                bound += ["--bind", str(self.folder / name), f"/{name}"]
        process = subprocess.Popen(
            ["bwrap", *bound, "--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-net",
             "--chdir", workdir, "--", *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **env},
            start_new_session=True,
        )  # fmt: skip
        try:
            stdout, stderr = process.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            return ExecResult(124, stdout[:max_output], stderr[:max_output], timed_out=True)
        is_cut = len(stdout) > max_output or len(stderr) > max_output
        return ExecResult(process.returncode, stdout[:max_output], stderr[:max_output], is_cut)

    async def upload(self, source: Path, target: str) -> None:
        self.provider.count_call()
        self._copy_in(source, target)

    def _copy_in(self, source: Path, target: str) -> None:
        path = self.folder / target.lstrip("/")
        if source.is_dir():
            shutil.copytree(source, path, symlinks=True, dirs_exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, path)

    async def download(self, source: str, target: Path, *, max_bytes: int = 64 << 20) -> None:
        self.provider.count_call()
        self._copy_out(source, target, max_bytes)

    def _copy_out(self, source: str, target: Path, max_bytes: int) -> None:
        path = self.folder / source.lstrip("/")
        if not os.path.lexists(path):
            raise FileNotFoundError(source)
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise FileNotFoundError(source)
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        if sum(p.lstat().st_size for p in files) > max_bytes:
            raise ValueError(f"more than {max_bytes} bytes")
        if path.is_dir():

            def left_out(folder: str, names: list[str]) -> list[str]:
                paths = [Path(folder, name) for name in names]
                return [p.name for p in paths if p.is_symlink() or not (p.is_file() or p.is_dir())]

            shutil.copytree(path, target, ignore=left_out)
        else:
            shutil.copy2(path, target)

    async def snapshot(self) -> str:
        self.provider.count_call()
        image = f"image-{next(_numbers)}"
        shutil.copytree(self.folder, self.provider.root / image, symlinks=True)
        return image

    async def fork(self) -> FolderSandbox:
        return await self.provider.start(
            SandboxSpec(**{**vars(self.spec), "image": await self.snapshot()})
        )

    async def reset(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        self.provider.living.discard(self)
        shutil.rmtree(self.folder, ignore_errors=True)
