"""Builds a folder that installs rlearner on a machine without a network.

    make bundle [TARGET_PYTHON=3.12] [HAVE=torch,transformers,…] [HAVE_FILE=freeze.txt] [MODEL=FILE] [PART_SIZE=45]

The folder holds the wheels that rlearner needs and the target lacks, with the versions and hashes
of ``runtime.txt``, rlearner's own wheel, the benchmarks, ``install.sh``, and the model file in
parts, if one is named. Wheels are chosen by the tags of Linux on x86-64 with glibc up to 2.39; a
package without a wheel is built from its source, which works only if it has no compiled code. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Packages of a common image for GPUs: torch 2.11 for CUDA 13, transformers 5.17, Python 3.12.
IMAGE = (
    "torch,sympy,mpmath,networkx,filelock,fsspec,typing-extensions,numpy,triton,transformers,tokenizers,safetensors,"
    "huggingface-hub,regex,tqdm,accelerate,peft,aiohttp,psutil,tensorboard,uvloop,matplotlib,pillow,jinja2,pyyaml,"
    "prometheus-client,packaging"
)
NEWEST_GLIBC = 39  # 2.39, of Ubuntu 24.04; wheels name the oldest glibc that they run on
PLATFORMS = ["linux_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
ABSENT = "0"  # the version of a package that HAVE names without one
MIB = 1 << 20
LOCKS = ("runtime.txt", "broker.txt", "real-model.txt")

Requires = Callable[[str], Sequence[Requirement] | None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the bundle; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="make bundle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", default="3.12", help="version of the target (%(default)s)")
    parser.add_argument(
        "--have", default="", help=f"packages that the target has, with commas ({IMAGE})"
    )
    parser.add_argument(
        "--have-file", default="", metavar="FILE", help="the same as pip freeze prints it"
    )
    parser.add_argument("--model", default="", metavar="FILE", help="a model file to take along")
    parser.add_argument(
        "--part-size", type=int, default=45, metavar="MIB", help="of its parts (%(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("bundle"), metavar="FOLDER", help="(%(default)s)"
    )
    parser.add_argument(
        "--list-image", action="store_true", help="print a lock of the image's packages but torch"
    )
    options = parser.parse_args(arguments)
    if options.list_image:
        print(image_lock())
        return 0
    try:
        print(json.dumps(build_bundle(options)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def build_bundle(options: argparse.Namespace) -> dict[str, Any]:
    """Write the folder and return what the last line says.

    Raises:
        ValueError: if an option is not allowed, or a package cannot be had for the target.
    """
    if re.fullmatch(r"3\.(1[1-9])", options.python) is None:
        raise ValueError(
            f"TARGET_PYTHON: {options.python!r} is not allowed; a Python from 3.11 on, such as 3.12"
        )
    if options.part_size < 1:
        raise ValueError(f"PART_SIZE: {options.part_size} is not allowed; MiB from 1 on")
    model = Path(options.model) if options.model else None
    if model is not None and not model.is_file():
        raise ValueError(f"MODEL: {options.model}: there is no such file")
    present = read_present(options.have or IMAGE, options.have_file)
    entries = locked_entries(
        "".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in LOCKS)
    )
    missing = missing_packages(project_requirements(), present, installed_requirements)
    if model is not None and model.suffix == ".gguf":
        missing |= {"gguf"} - present.keys()  # what converts it there
    if unknown := sorted(missing - entries.keys()):
        raise ValueError(
            f"no locked version of {', '.join(unknown)}; make setup LOCKED= && make lock"
        )
    out: Path = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    fetch_wheels([entries[name] for name in sorted(missing)], wheels, options.python)
    run([sys.executable, str(ROOT / "requirements" / "dist.py"), str(out / "dist")])
    (own,) = (out / "dist").glob("*.whl")
    shutil.move(own, wheels)
    shutil.rmtree(out / "dist")
    export_folder("bench", out)
    if model is not None:
        split_file(model, out / "model", options.part_size * MIB)
    for name in ("install.sh", "install.py"):
        shutil.copy(HERE / name, out)
    manifest = {
        "python": options.python, "machine": "x86_64", "have": sorted(present), "commit": commit(),
        "glibc": oldest_glibc(path.name for path in wheels.iterdir()),
        "model": None if model is None else {"name": model.name, "sha256": digest(model)},
    }  # fmt: skip
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    write_checksums(out)
    sizes = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    carried = sum(size for path, size in sizes.items() if path.parent.name == "model")
    return {
        "bundle": str(out), "bundle_mib": round((sum(sizes.values()) - carried) / MIB, 2),
        "model_mib": round(carried / MIB, 2), "python": options.python, "glibc": manifest["glibc"],
        "wheels": len(list(wheels.iterdir())), "packages": sorted(missing),
    }  # fmt: skip


def read_present(names: str, freeze: str) -> dict[str, str]:
    """Return the packages that the target has, by canonical name, with their versions where they
    are known.

    Raises:
        ValueError: if the file cannot be read, or a name or version is malformed.
    """
    try:
        lines = (
            Path(freeze).read_text(encoding="utf-8").splitlines() if freeze else names.split(",")
        )
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"HAVE_FILE: {freeze}: {getattr(error, 'strerror', None) or 'not a text file'}"
        ) from None
    key = "HAVE_FILE" if freeze else "HAVE"
    present: dict[str, str] = {}
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        # as pip freeze prints what came from a folder or an address
        if line.startswith("-e ") or " @ " in line:
            continue
        name, _, version = line.partition("==")
        try:
            requirement = Requirement(name)
            present[canonicalize_name(requirement.name)] = (
                str(Version(version)) if version else ABSENT
            )
        except (InvalidRequirement, InvalidVersion):
            raise ValueError(f"{key}: {line!r} is not allowed; NAME or NAME==VERSION") from None
        if requirement.specifier or requirement.extras or requirement.marker:
            raise ValueError(f"{key}: {line!r} is not allowed; NAME or NAME==VERSION")
    return present


def project_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return [Requirement(line) for line in project["dependencies"]]


def installed_requirements(name: str) -> list[Requirement] | None:
    """Return what an installed package asks for; None if it is not installed here."""
    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return None
    requirements = map(Requirement, lines)
    return [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]


def missing_packages(
    wanted: Iterable[Requirement], present: Mapping[str, str], requires: Requires
) -> set[str]:
    """Return the packages that the target lacks, with what they need that it lacks, too.

    A package whose version is known and too old counts as missing. What a present package needs is
    not looked at.

    Raises:
        ValueError: if torch is missing or too old, because its build depends on the target's
            driver.
    """
    torch = next((requirement for requirement in wanted if requirement.name == "torch"), None)
    if torch is not None and not is_present(torch, present):
        version = present.get("torch", "none")
        raise ValueError(
            f"HAVE: torch {version} is not allowed; the target needs its own build, torch{torch.specifier}"
        )
    missing: set[str] = set()
    pending = list(wanted)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in missing or is_present(requirement, present):
            continue
        missing.add(name)
        pending += requires(name) or []
    return missing


def is_present(requirement: Requirement, present: Mapping[str, str]) -> bool:
    """Return whether the target has a package in a version that will do; an unknown version will."""
    version = present.get(canonicalize_name(requirement.name))
    return version is not None and (
        version == ABSENT or requirement.specifier.contains(version, prereleases=True)
    )


def locked_entries(text: str) -> dict[str, str]:
    """Return each requirement of a lock with its hashes, by canonical name."""
    entries = re.findall(r"^\S+==(?:.|\n(?=    ))*\n?", text, re.MULTILINE)
    return {canonicalize_name(entry.partition("==")[0]): entry for entry in entries}


def image_lock() -> str:
    """Return the locked entries of what the image holds, with what that needs, but not torch."""
    entries = locked_entries((ROOT / "requirements" / "setup.txt").read_text(encoding="utf-8"))
    names: set[str] = set()
    pending = IMAGE.split(",")
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in names and name in entries:
            names.add(name)
            pending += [requirement.name for requirement in installed_requirements(name) or []]
    return "\n".join(entries[name] for name in sorted(names))


def platforms() -> list[str]:
    """Return the platform tags that pip may choose from; it matches each exactly."""
    return [f"manylinux_2_{minor}_x86_64" for minor in range(NEWEST_GLIBC, 4, -1)] + PLATFORMS[::-1]


def fetch_wheels(entries: Sequence[str], wheels: Path, python: str) -> None:
    """Download wheels for the target, and build those of packages that have only a source.

    Raises:
        ValueError: if a package has neither, or its source has compiled code.
    """
    target = ["--python-version", python, "--implementation", "cp"]
    target += [word for platform in platforms() for word in ("--platform", platform)]
    for entry in entries:
        name = entry.partition("==")[0]
        with tempfile.TemporaryDirectory(prefix="rlearner-bundle-") as folder:
            lock = Path(folder, "lock.txt")
            lock.write_text(entry, encoding="utf-8")
            common = ["--no-deps", "--require-hashes", "--requirement", str(lock), "--quiet"]
            done = pip("download", *common, "--only-binary=:all:", *target, "--dest", str(wheels))
            if done.returncode == 0:
                continue
            built = Path(folder, "built")
            done = pip(
                "wheel",
                *common,
                "--no-binary=:all:",
                "--no-build-isolation",
                "--wheel-dir",
                str(built),
            )
            files = list(built.glob("*.whl"))
            if done.returncode or len(files) != 1:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                raise ValueError(
                    f"{name}: no wheel for Python {python} on x86-64, and no source: {reason}"
                )
            if not files[0].name.endswith("-none-any.whl"):
                raise ValueError(
                    f"{name}: no wheel for Python {python} on x86-64; its source has compiled code"
                )
            shutil.move(files[0], wheels)


def pip(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(command: Sequence[str]) -> str:
    """Run a program and return what it prints.

    Raises:
        ValueError: if it fails, with its last line.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(f"{Path(command[1]).name}: {reason.removeprefix('error: ')}")
    return done.stdout


def export_folder(folder: str, out: Path) -> None:
    """Copy a folder of the project as it is committed, like the wheel; outside a clone as it is."""
    if not (ROOT / ".git").exists():
        shutil.copytree(ROOT / folder, out / folder, ignore=shutil.ignore_patterns("__pycache__"))
        return
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", "HEAD", folder]
    archive = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(out, filter="data")


def split_file(source: Path, folder: Path, size: int) -> None:
    """Write a file in parts of at most ``size`` bytes, numbered in their order."""
    folder.mkdir()
    with source.open("rb") as file:
        for number in range(1 + (source.stat().st_size - 1) // size):
            (folder / f"{source.name}.part-{number:03d}").write_bytes(file.read(size))


def write_checksums(out: Path) -> None:
    """Write SHA256SUMS over all files, which ``sha256sum --check`` reads, too."""
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    lines = [f"{digest(path)}  {path.relative_to(out)}\n" for path in paths]
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def oldest_glibc(names: Iterable[str]) -> str:
    """Return the oldest glibc on which all wheels of these names run, such as 2.28."""
    aliases = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}
    newest = min(aliases.values())
    for name in names:
        minors = []
        for tag in parse_wheel_filename(name)[3]:
            if (match := re.match(r"manylinux_2_(\d+)_", tag.platform)) is not None:
                minors.append(int(match[1]))
            minors += [
                minor for alias, minor in aliases.items() if tag.platform.startswith(f"{alias}_")
            ]
        newest = max(newest, min(minors, default=newest))
    return f"2.{newest}"


def commit() -> str:
    """Return the commit of the clone; empty outside of one."""
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main())
