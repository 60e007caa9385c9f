"""Modes, owners, links and crashes of private files."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.errors import UserError
from broker.system import private_files
from broker.system.children import spawn
from broker.system.entry import enter
from broker.system.private_files import (
    draft_of,
    open_private,
    private_folder,
    private_write,
    replace,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
STRANGER = 65534


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """The most careless umask."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    assert mode(private_folder(tmp_path / "a" / "b")) == 0o700


@pytest.mark.parametrize("before", [0o755, 0o775, 0o700, 0o2750])
def test_an_older_folder_becomes_private(tmp_path: Path, before: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(before)
    assert mode(private_folder(tmp_path / "run")) == 0o700


def test_a_folder_that_everyone_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(
        UserError, match=rf"run can be written by every user; .*chmod 700 {tmp_path}/run$"
    ):
        private_folder(tmp_path / "run")
    assert mode(tmp_path / "run") == 0o777, "nothing is changed"


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    os.chown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(
        UserError, match=r"belongs to another user \(uid 65534\); name a folder of yours"
    ):
        private_folder(tmp_path / "run")
    assert mode(tmp_path / "run") == 0o755


@as_root
def test_a_link_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir(mode=0o700)
    (tmp_path / "run").symlink_to(tmp_path / "ours")
    assert private_folder(tmp_path / "run") == tmp_path / "run", "a link of ours is followed"
    os.lchown(tmp_path / "run", STRANGER, STRANGER)
    with pytest.raises(UserError, match=r"run is a link that another user \(uid 65534\) made"):
        private_folder(tmp_path / "run")


def test_a_file_in_the_place_of_a_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(OSError, match="exists"):
        private_folder(tmp_path / "run")


def test_written_files_are_private_and_leave_no_draft(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")
    assert mode(tmp_path / "a") == 0o666
    private_write(tmp_path / "a", b"after")
    assert ((tmp_path / "a").read_bytes(), mode(tmp_path / "a")) == (b"after", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"before")

    def fail(draft: Path) -> None:
        assert mode(draft) == 0o600
        draft.write_bytes(b"half")
        raise LookupError

    with pytest.raises(LookupError), draft_of(tmp_path / "a") as draft:
        fail(draft)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"before")]


def test_a_file_is_flushed_before_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def note_sync(file: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        real_sync(file)

    def note_replace(source: Path, target: Path) -> None:
        calls.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    private_write(tmp_path / "a", b"x")
    assert calls == ["file", "rename", "folder"]
    calls.clear()
    replace(tmp_path / "a", tmp_path / "b")
    assert calls == ["rename", "folder"]


def test_names_of_drafts_cannot_be_guessed(tmp_path: Path) -> None:
    names = set()
    for _ in range(2):
        with draft_of(tmp_path / "a") as draft:
            names.add(draft.name)
    assert len(names) == 2


def test_an_opened_file_is_private(tmp_path: Path) -> None:
    (tmp_path / "old").touch(0o664)
    for name in ("old", "new"):
        os.close(open_private(tmp_path / name, os.O_WRONLY | os.O_CREAT))
        assert mode(tmp_path / name) == 0o600


def test_devices_and_links_of_ours_may_be_opened(tmp_path: Path) -> None:
    before = mode(Path(os.devnull))
    (tmp_path / "link").symlink_to(os.devnull)
    os.close(open_private(tmp_path / "link", os.O_WRONLY))
    assert mode(Path(os.devnull)) == before


@as_root
@pytest.mark.parametrize("kind", ["link", "file"])
def test_a_file_or_link_of_another_user_is_not_opened(tmp_path: Path, kind: str) -> None:
    victim, planted = tmp_path / "victim", tmp_path / "planted"
    victim.write_bytes(b"ours")
    planted.symlink_to(victim) if kind == "link" else planted.touch()
    os.chown(planted, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UserError, match=r"another user \(uid 65534\)"):
        open_private(planted, os.O_WRONLY | os.O_CREAT)
    assert victim.read_bytes() == b"ours"


def test_a_command_creates_private_files_and_restores_the_umask(tmp_path: Path) -> None:
    def command() -> int:
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
        return 0

    assert enter(command) == 0
    assert (mode(tmp_path / "file"), mode(tmp_path / "folder")) == (0o600, 0o700)
    (tmp_path / "after").touch()
    assert mode(tmp_path / "after") == 0o666


def test_children_create_private_files(tmp_path: Path) -> None:
    script = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"
    with (tmp_path / "output").open("wb") as output:
        child = spawn([sys.executable, "-c", script, str(tmp_path / "made")], output)
        assert child.wait(30) == 0
    assert mode(tmp_path / "made") == 0o600


def test_a_killed_writer_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    """Killed at the rename, which is the last moment at which the file is not there yet."""
    (tmp_path / "a").write_bytes(b"before")
    script = (
        "import os, pathlib, signal, sys\nfrom broker.system import private_files\n"
        "os.replace = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)\n"
        "private_files.private_write(pathlib.Path(sys.argv[1]), b'after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a")], check=False, timeout=60
    )
    assert done.returncode == -9
    assert (tmp_path / "a").read_bytes() == b"before"
    drafts = [path for path in tmp_path.iterdir() if path.name != "a"]
    assert [(path.suffix, mode(path)) for path in drafts] == [(private_files.SUFFIX, 0o600)]
