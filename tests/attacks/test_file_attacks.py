"""Another user of the host reads and changes nothing of a run, even where folders above it are open
to all.

Each attempt is made by a process with another uid, first on a file that is open to all, to see that
it would work.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
NOBODY = 65534
SETTINGS = [
    "configs/quickstart.yaml",
    "run.name=files",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, intermediate_size: 32, "
    "vocab: chars}",
    "warm_start.steps=0",
    "eval.every_steps=0",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "train.groups_per_step=1",
    "train.steps=2",
    "checkpoint.every_steps=1",
]
# what a run leaves behind, and what a stranger would want of it
WANTED = {
    "settings": "files/config.yaml",
    "metrics": "files/metrics.jsonl",
    "weights": "files/checkpoints/**/*.safetensors",
    "logs": "files/logs/*.log",
    "the broker's messages": "**/*.blk",
    "the broker's configuration": "**/nats-server.conf",
    "the operator's key": "**/operator.key",
    "the learner's key": "**/learner.key",
    "who may connect": "**/users/*.json",
}


@pytest.fixture(scope="module")
def runs() -> Iterator[Path]:
    """The folder of a finished run, below folders that everyone can enter, made with an open umask."""
    folder = Path(tempfile.mkdtemp(prefix="rlearner-open-"))
    folder.chmod(0o755)
    (folder / "open").write_text("hello")
    (folder / "open").chmod(0o666)
    command = [sys.executable, "-m", "rlearner.cli", "up", *SETTINGS, f"run.dir={folder}/runs"]
    (folder / "runs").mkdir(mode=0o755)
    done = subprocess.run(
        command, capture_output=True, text=True, umask=0, timeout=300, check=False
    )
    try:
        assert done.returncode == 0, done.stderr
        yield folder / "runs"
    finally:
        shutil.rmtree(folder)


READ, WRITE, DELETE, LIST, PLANT = (
    'cat "$0"',
    'echo x > "$0"',
    'rm "$0"',
    'ls "$0"',
    'echo x > "$0/planted"',
)


def as_nobody(attempt: str, path: Path) -> str:
    """Return "done", or what the shell says, of an attempt by another user."""
    command = ["/bin/sh", "-c", attempt, str(path)]
    done = subprocess.run(
        command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, check=False
    )
    return done.stderr.decode().strip().rpartition(": ")[2] if done.returncode else "done"


DENIED = "Permission denied"


def test_the_attempts_work_on_what_is_open(runs: Path) -> None:
    for attempt in (READ, WRITE):
        assert as_nobody(attempt, runs.parent / "open") == "done"
    assert as_nobody(LIST, runs.parent) == "done"


@pytest.mark.parametrize("what", WANTED)
def test_another_user_reads_and_changes_nothing(what: str, runs: Path) -> None:
    found = [path for path in runs.glob(WANTED[what]) if path.is_file()]
    assert found, sorted(str(path.relative_to(runs)) for path in runs.rglob("*"))
    for path in found:
        before = path.read_bytes()
        assert {as_nobody(attempt, path) for attempt in (READ, WRITE, DELETE)} == {DENIED}
        assert path.read_bytes() == before
        assert path.stat().st_mode & 0o077 == 0


def test_another_user_enters_no_folder(runs: Path) -> None:
    folders = [path for path in runs.rglob("*") if path.is_dir()]
    assert len(folders) > 10
    for folder in folders:
        assert {as_nobody(attempt, folder) for attempt in (LIST, PLANT)} == {DENIED}


def test_no_file_of_a_run_is_open_to_others(runs: Path) -> None:
    modes = {
        str(path.relative_to(runs)): path.lstat().st_mode & 0o077
        for path in runs.rglob("*")
        if not path.is_symlink()
    }
    assert {path: mode for path, mode in modes.items() if mode} == {}


def test_nothing_is_left_where_all_users_may_write(runs: Path) -> None:
    own = {
        path
        for place in ("/tmp", "/dev/shm")
        for path in Path(place).glob("*rlearner*")
        if path.owner() == "root"
    }
    assert {path for path in own if path != runs.parent and path.stat().st_mode & 0o077} == set()
