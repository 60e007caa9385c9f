"""Images and containers of Dockerfile, in a store of their own that goes when the tests end.

buildah builds them (``--isolation chroot``), podman runs them with runc. Where pip has a folder
of wheels (``find-links``) or an authority of its own, the build gets them too.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
VERSION: Final[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
BUILD_S, RUN_S = 2400.0, 300.0
DEBIAN: Final = "bookworm"
LOCKED: Final = (
    "--read-only",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
    "--tmpfs",
    "/tmp",
)


class Containers:
    """buildah and podman.

    Args:
        folder: a new folder for images and containers; some gigabytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds: dict[str, float] = {}  # of each build
        files, processes = (
            resource.getrlimit(one)[1] for one in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
        )
        limits = [f"{name}={min(most, value if value >= 0 else most)}" for name, value, most in
                  (("nofile", files, 4096), ("nproc", processes, 4096))]  # fmt: skip
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "{os.environ.get("RL_STORAGE_DRIVER", "overlay")}"\n'
            f'graphroot = "{folder}/graph"\nrunroot = "{folder}/run"\n'
        )
        ulimits = ", ".join(f'"{one}:{one.partition("=")[2]}"' for one in limits)
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = [{ulimits}]\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\n'
            f'events_logger = "file"\n[network]\nnetwork_config_dir = "{folder}/networks"\n'
        )
        self.environment = os.environ | {
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
        }

    def call(
        self, *command: str, check: bool = True, timeout_s: float = RUN_S, **options: Any
    ) -> Any:
        """Run a command; return what it printed, exit code included."""
        ended = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            **options,
        )
        assert ended.returncode == 0 or not check, (
            f"{' '.join(command)}\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
        )
        return ended

    def podman(self, *words: str, check: bool = True, timeout_s: float = RUN_S) -> str:
        """Run podman; return what it printed on standard output."""
        return str(self.call("podman", *words, check=check, timeout_s=timeout_s).stdout)

    def base(self) -> str:
        """Return the image that RL_IMAGE_BASE names, or make one of a Debian with Python."""
        if named := os.environ.get("RL_IMAGE_BASE"):
            return named
        if self.call("podman", "image", "exists", "localhost/base", check=False).returncode == 0:
            return "localhost/base"
        tree, archive = self.folder / "debian", self.folder / "debian.tar"
        self.call(
            "debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", DEBIAN, str(tree),
            timeout_s=BUILD_S,
        )  # fmt: skip
        self.call("tar", "-C", str(tree), "-cf", str(archive), ".")
        shutil.rmtree(tree)
        self.podman("import", str(archive), "localhost/base")
        archive.unlink()
        return "localhost/base"

    def build(self, target: str, base: str) -> str:
        """Build a target of Dockerfile; return the image's name."""
        name, started = f"localhost/rlearner:{target}", time.monotonic()
        self.call(
            "buildah", "bud", "--format", "docker", "--isolation", "chroot", "--network", "host", "--layers",
            "--build-arg", f"BASE={base}", "--build-arg", f"VERSION={VERSION}", *_of_pip(), "--target", target, "-t", name,
            str(ROOT), timeout_s=BUILD_S,
        )  # fmt: skip
        self.seconds[target] = time.monotonic() - started
        return name

    def inspect(self, what: str, name: str) -> Any:
        """Return what podman knows of an image or a container."""
        (found,) = json.loads(self.podman(what, "inspect", name))
        return found

    def start(self, image: str, *command: str, options: tuple[str, ...] = ()) -> str:
        """Start a container; return its id."""
        return self.podman("run", "--detach", *LOCKED, *options, image, *command).strip()

    def ended(self, container: str, timeout_s: float = RUN_S) -> int:
        """Wait until a container has ended; return its exit code."""
        return int(self.podman("wait", container, timeout_s=timeout_s).split()[-1])

    def logs(self, container: str) -> str:
        """Return what a container has printed on both streams."""
        said = self.call("podman", "logs", container)
        return str(said.stdout + said.stderr)

    def until(self, condition: Callable[[], Any], what: str, within_s: float = 120.0) -> Any:
        """Wait for a condition; return its value."""
        deadline = time.monotonic() + within_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
            time.sleep(0.5)
        return found

    def close(self, keep: bool = False) -> None:
        """Remove all of it, or all but the images."""
        if keep:
            self.podman("rm", "--all", "--force", check=False)
            self.podman("volume", "prune", "--force", check=False)
            return
        for words in (["rm", "--all", "--force"], ["volume", "prune", "--force"], ["network", "prune", "--force"],
                      ["rmi", "--all", "--force"]):  # fmt: skip
            self.podman(*words, check=False)
        for place in (self.folder / "graph" / "overlay", self.folder / "graph"):
            subprocess.run(["umount", "--lazy", str(place)], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def _of_pip() -> list[str]:
    """Return the options that let the build reach packages as pip does on this machine."""
    options, pip = [], [sys.executable, "-m", "pip", "config", "get"]
    authority = os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE")
    if authority and Path(authority).is_file():
        options += ["--secret", f"id=ca.pem,src={authority}"]
    links = subprocess.run(
        [*pip, "global.find-links"], capture_output=True, text=True, check=False
    ).stdout.split()
    if wheels := next((one for one in links if Path(one).is_dir()), ""):
        options += ["--build-context", f"wheels={wheels}"]
        if list(Path(wheels).glob("torch-*+cpu-*.whl")):
            options += ["--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    return options
