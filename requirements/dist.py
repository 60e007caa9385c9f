"""Builds wheel and sdist with the same bytes wherever and whenever they are built from one commit.

    make dist

In a clone it builds what is committed, dated by the commit; in an unpacked sdist it builds the same
files again. The wheel is built from the sdist. Bytes also depend on the versions of setuptools
(``build.txt``) and zlib.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"PKG-INFO", "setup.cfg"}  # by setuptools, in an sdist
BUILD = """
import os, sys
os.umask(0o022)
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def main() -> None:
    """Build both and print their digests."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rlearner-dist-") as place:
        source, unpacked = Path(place, "source"), Path(place, "unpacked")
        epoch = export(source)
        sdist = normalised(
            Path(place, build(source, "build_sdist", Path(place), epoch)), out, epoch
        )
        with tarfile.open(sdist) as archive:
            archive.extractall(unpacked, filter="data")
        (root,) = unpacked.iterdir()
        made = Path(place, "wheel")
        wheel = shutil.copy(made / build(root, "build_wheel", made, epoch), out)
    for file in (Path(wheel), sdist):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file}")


def export(source: Path) -> int:
    """Copy the files to build from, with plain modes, and return their time in seconds since 1970."""
    if (ROOT / ".git").exists():
        git = ["git", "-C", str(ROOT)]
        archive = subprocess.run(
            [*git, "archive", "--format=tar", "HEAD"], check=True, capture_output=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(source, filter="data")
        epoch = int(
            subprocess.run(
                [*git, "log", "-1", "--format=%ct"], check=True, capture_output=True
            ).stdout
        )
        if subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True).stdout:
            print("note: changes that are not committed are not built", file=sys.stderr)
    elif (ROOT / "PKG-INFO").is_file():
        epoch = int((ROOT / "PKG-INFO").stat().st_mtime)
        listed = next(ROOT.glob("*.egg-info")) / "SOURCES.txt"
        for name in listed.read_text(encoding="utf-8").splitlines():
            if name not in GENERATED and ".egg-info/" not in name:
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, source / name)
    else:
        sys.exit(f"error: {ROOT} is neither a clone nor an unpacked sdist")
    for path in (source, *source.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    return epoch


def build(source: Path, what: str, out: Path, epoch: int) -> str:
    """Run one hook of setuptools in a folder and return the name of the file that it made."""
    out.mkdir(exist_ok=True)
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(out)],
        cwd=source,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"error: {what} failed\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def normalised(sdist: Path, out: Path, epoch: int) -> Path:
    """Write an sdist again without what differs between builds: times, owners, modes, order."""
    made = out / sdist.name
    with tarfile.open(sdist) as archive, made.open("wb") as file:
        members = sorted(
            (member for member in archive if member.isfile()), key=lambda member: member.name
        )
        with (
            gzip.GzipFile("", "wb", compresslevel=9, fileobj=file, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as written,
        ):
            for member in members:
                plain = tarfile.TarInfo(member.name)
                plain.size, plain.mtime = member.size, epoch
                plain.mode = 0o755 if member.mode & 0o100 else 0o644
                written.addfile(plain, archive.extractfile(member))
    return made


if __name__ == "__main__":
    main()
