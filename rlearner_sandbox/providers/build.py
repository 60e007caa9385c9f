"""Builds images for sandboxes from archives, folders and Dockerfiles, without the network."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from rlearner_sandbox.providers.images import import_image
from rlearner_sandbox.providers.layers import Image, LayerStore

TOOLS: Final = ("buildah", "podman")
BUILD_S: Final = 3600.0
_REMOTE_ADD: Final = re.compile(r"^\s*ADD\s.*\b(https?|git|ftp)(://|@)", re.IGNORECASE)
_STEP: Final = re.compile(r"^STEP \d+(?:/\d+)?: (.*)$", re.MULTILINE)


def build_image(
    source: Path, store: LayerStore, *, context: Path | None = None, tool: str = ""
) -> str:
    """Store an image and return its digest.

    Args:
        source: an image's archive or folder, a root file system, or a Dockerfile or its folder.
        context: what a Dockerfile copies from; None: its own folder.
        tool: plays Dockerfiles; empty: the first of buildah and podman that is installed.

    Raises:
        ValueError: if it is none of these, or the Dockerfile fails; in one line.
    """
    if not source.exists():
        raise ValueError(f"{source} is not there")
    if source.is_dir():
        if (source / "index.json").is_file() or (source / "manifest.json").is_file():
            return _import_image(source, store)
        if (source / "Dockerfile").is_file():
            return _build_file(source / "Dockerfile", store, context or source, tool)
        if (source / "etc").is_dir() or (source / "bin").exists():
            return store.add_image(Image((store.add_layer(store.import_tree(source)),)))
        raise ValueError(
            f"{source} is no image: a folder needs index.json, Dockerfile, or etc or bin of a root "
            "file system"
        )
    if _is_text(source):
        return _build_file(source, store, context or source.parent, tool)
    return _import_image(source, store)


def _import_image(source: Path, store: LayerStore) -> str:
    try:
        return import_image(source, store)
    except OSError as error:
        raise ValueError(f"{source}: {error}") from None


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(512)
    return b"\0" not in start and not start.startswith(b"\x1f\x8b")


def _build_file(file: Path, store: LayerStore, context: Path, tool: str) -> str:
    program = _find_tool(tool)
    _refuse_network(file)
    with tempfile.TemporaryDirectory(prefix="rlearner-build-", dir=store.folder) as folder:
        archive = Path(folder, "image.tar")
        name = f"localhost/rlearner-build-{os.path.basename(folder).lower()}"
        words = ["build", "--network", "none", "--pull=never", "--layers=false"]
        try:
            _call_tool([program, *words, "--file", str(file), "--tag", name, str(context)], file)
            if os.path.basename(program) == "podman":
                save = ["save", "--format", "oci-archive", "--output", str(archive), name]
            else:
                save = ["push", name, f"oci-archive:{archive}"]
            _call_tool([program, *save], file)
            return import_image(archive, store)
        finally:
            subprocess.run([program, "rmi", "--force", name], capture_output=True, check=False)


def _find_tool(tool: str) -> str:
    for name in [tool] if tool else TOOLS:
        path = shutil.which(name)
        if path is not None:
            return path
    names = tool or " or ".join(TOOLS)
    raise ValueError(f"a Dockerfile needs {names}, which is not on PATH: apt-get install buildah")


def _refuse_network(file: Path) -> None:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if _REMOTE_ADD.match(line):
            raise ValueError(
                f"{file}:{number}: {line.strip()[:100]}: an image is built without the network; "
                "put the file into the context and copy it"
            )


def _call_tool(command: list[str], file: Path) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=BUILD_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{file}: the build took more than {BUILD_S:.0f} s") from None
    except OSError as error:
        raise ValueError(f"{command[0]}: {error}") from None
    if result.returncode:
        raise ValueError(_explain_failure(result, file))


def _explain_failure(result: subprocess.CompletedProcess[bytes], file: Path) -> str:
    steps = _STEP.findall(result.stdout.decode(errors="replace"))
    step = f" {steps[-1].strip()[:100]}:" if steps else ""
    lines = [line.strip() for line in result.stderr.decode(errors="replace").splitlines()]
    # The last lines are the builder's own; the step's come before.
    words = [line for line in lines if line][-4:]
    return f"{file}:{step} failed, without the network: {'; '.join(words)[-400:]}"
