"""Installs rlearner from the folder of this file; needs Python's standard library and pip only."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class BundleError(Exception):
    """The bundle does not fit this machine, or is damaged."""


def main() -> int:
    """Check, install, and print the line that sets the variables; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="install.sh", description="Install rlearner without a network."
    )
    parser.add_argument("--target", default="rlearner-site", metavar="FOLDER", help="(%(default)s)")
    parser.add_argument(
        "--model-folder", default="models", metavar="FOLDER", help="of the model file (%(default)s)"
    )
    options = parser.parse_args()
    try:
        manifest = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
        check_machine(manifest)
        check_files()
        check_packages(manifest["have"])
        target = Path(options.target).resolve()
        install(target)
        if manifest["model"] is not None:
            print(
                "model:", join_model(manifest["model"], Path(options.model_folder)), file=sys.stderr
            )
    except FileNotFoundError as error:
        return fail(f"{error.filename}: missing in the bundle")
    except (BundleError, OSError) as error:
        return fail(str(error))
    words = {name: f"{shlex.quote(str(place))}:${name}" for name, place in places(target).items()}
    print("export " + " ".join(f"{name}={value}" for name, value in words.items()))
    return 0


def fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


def places(target: Path) -> dict[str, Path]:
    """Return the folder that each variable begins with."""
    return {"PATH": target / "bin", "PYTHONPATH": target}


def check_machine(manifest: dict[str, Any]) -> None:
    """Raise BundleError if Python, processor or C library are not those of the bundle."""
    python = ".".join(map(str, sys.version_info[:2]))
    if python != manifest["python"]:
        raise BundleError(
            f"{sys.executable} is Python {python}; the bundle is for Python {manifest['python']}"
        )
    if platform.machine() != manifest["machine"]:
        raise BundleError(
            f"this machine is {platform.machine()}; the bundle is for {manifest['machine']}"
        )
    library, found = platform.libc_ver()
    if library != "glibc":
        raise BundleError(
            f"the C library is {library or 'not glibc'}; the bundle needs glibc {manifest['glibc']}"
        )
    if numbers(found) < numbers(manifest["glibc"]):
        raise BundleError(
            f"the C library is glibc {found}; the bundle needs {manifest['glibc']} or newer"
        )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def check_files() -> None:
    """Raise BundleError if a file is missing or has other bytes than when the bundle was made."""
    for line in (HERE / "SHA256SUMS").read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        if not (HERE / name).is_file():
            raise BundleError(f"{name}: missing in the bundle")
        if digest(HERE / name) != expected:
            raise BundleError(f"{name}: wrong checksum; copy the bundle again")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_packages(names: list[str]) -> None:
    """Raise BundleError if this Python lacks packages that the bundle counts on."""
    missing = []
    for name in names:
        try:
            version(name)
        except PackageNotFoundError:
            missing.append(name)
    if missing:
        raise BundleError(
            f"{sys.executable} lacks {', '.join(missing)}; build the bundle with HAVE without them"
        )


def install(target: Path) -> None:
    """Install all wheels and the benchmarks into a folder."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    command += [
        "--no-compile",
        "--no-cache-dir",
        "--no-warn-script-location",
        "--upgrade",
        "--target",
        str(target),
    ]
    command += [str(path) for path in sorted((HERE / "wheels").glob("*.whl"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BundleError(f"pip: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
    shutil.copytree(HERE / "bench", target / "bench", dirs_exist_ok=True)
    shutil.copy(HERE / "manifest.json", target / "bench")  # measurements name its commit
    variables = {
        name: f"{place}:{os.environ.get(name, '')}" for name, place in places(target).items()
    }
    words = [sys.executable, "-c", "import broker.contract.wire, rlearner_text.config"]
    done = subprocess.run(
        words, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BundleError(
            f"installed, but not usable: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )


def join_model(model: dict[str, str], folder: Path) -> Path:
    """Join the parts of the model file and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / model["name"]
    with path.open("wb") as file:
        for part in sorted((HERE / "model").iterdir()):
            file.write(part.read_bytes())
    if digest(path) != model["sha256"]:
        path.unlink()
        raise BundleError(
            f"{model['name']}: wrong checksum after joining its parts; copy the bundle again"
        )
    return path


if __name__ == "__main__":
    sys.exit(main())
