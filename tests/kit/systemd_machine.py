"""A machine of its own under a real systemd: a Debian tree booted by systemd-nspawn, with this
Python and this source.

Needs root, systemd-container and a tree; ``make test-systemd`` prepares them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = {
    "rlearner": "rlearner.cli",
    "broker": "broker.cli",
    "rollout-server": "rollout.cli",
    "envhub": "envhub.cli",
    "rewardhub": "rewardhub.cli",
}
PREFIX = "/opt/rlearner"


class Machine:
    """A booted tree; closed, it is gone with everything that happened in it.

    Args:
        tree: of debootstrap; not changed.
        work: folder for what is bound into it.
    """

    def __init__(self, tree: Path, work: Path) -> None:
        version = f"python3.{sys.version_info.minor}"
        assert (tree / "usr/bin" / version).exists(), (
            f"the tree has no {version}: use Debian 12's Python"
        )
        binds = {
            str(REPOSITORY): "/opt/source",
            str(
                Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
            ): "/opt/packages",
            str(_installation(work)): PREFIX,
        }
        # a killed test session leaves no machine behind
        command = ["setpriv", "--pdeathsig", "TERM"]
        command += [
            "systemd-nspawn",
            "--quiet",
            "--directory",
            str(tree),
            "--volatile=overlay",
            "--boot",
        ]
        command += [
            "--register=no",
            "--keep-unit",
            "--private-network",
            "--console=pipe",
            "--machine=rlearner-test",
        ]
        command += [f"--bind-ro={host}:{inside}" for host, inside in binds.items()]
        self._console = work / "console.log"
        with self._console.open("wb") as console:
            self._nspawn = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )
        self._leader = 0
        try:
            self.wait(self._find_leader, 30, "the machine has no first process")
            self.wait(self._is_up, 60, "the machine does not come up")
        except BaseException:
            self.close()
            raise

    def _find_leader(self) -> bool:
        children = (
            Path(f"/proc/{self._nspawn.pid}/task/{self._nspawn.pid}/children").read_text().split()
        )
        self._leader = int(children[0]) if children else 0
        if self._nspawn.poll() is not None:
            raise AssertionError("systemd-nspawn ended")
        return bool(self._leader) and os.readlink(f"/proc/{self._leader}/ns/pid") != os.readlink(
            "/proc/self/ns/pid"
        )

    def _is_up(self) -> bool:
        return self.run("systemctl is-system-running", check=False).strip() in (
            "running",
            "degraded",
        )

    def run(self, command: str, *, check: bool = True, timeout_s: float = 120.0) -> str:
        """Run a shell command in the machine as root; return what it prints, errors included."""
        enter = [
            "nsenter",
            "--all",
            "--target",
            str(self._leader),
            "/usr/bin/env",
            "-i",
            "PATH=/usr/bin:/usr/sbin",
        ]
        done = subprocess.run(
            [*enter, "/bin/sh", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
        )
        text = done.stdout.decode(errors="replace")
        if check and done.returncode:
            raise AssertionError(f"{command}: exit code {done.returncode}\n{text}")
        return text

    def put(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the machine."""
        there = Path(f"/proc/{self._leader}/root{path}")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
        there.chmod(mode)

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """Return properties of a unit."""
        lines = self.run(f"systemctl show '{unit}' --property={','.join(names)}").splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def journal(self, matches: str) -> str:
        """Return the messages of journal entries."""
        return self.run(f"journalctl --no-pager --output=cat {matches}", check=False)

    def wait(self, reached: Callable[[], object], within_s: float, what: str = "") -> None:
        """Wait until something is so.

        Raises:
            AssertionError: if it is not within a time.
        """
        until = time.monotonic() + within_s
        while not reached():
            assert time.monotonic() < until, what or f"not within {within_s} s"
            time.sleep(0.2)

    def wait_state(self, unit: str, state: str, within_s: float = 120.0) -> None:
        """Wait until ``systemctl is-active`` shows a state."""

        def reached() -> bool:
            return self.show(unit, "ActiveState")["ActiveState"] == state

        try:
            self.wait(reached, within_s)
        except AssertionError:
            raise AssertionError(
                f"{unit} is not {state}:\n{self.run(f'systemctl status {unit}', check=False)}"
            ) from None

    def console(self) -> str:
        """Return what the machine has printed."""
        return self._console.read_text(errors="replace")

    def close(self) -> None:
        """Switch it off."""
        if self._leader:
            self.run("systemctl --force --force poweroff", check=False)
        try:
            self._nspawn.wait(20)
        except subprocess.TimeoutExpired:
            self._nspawn.send_signal(signal.SIGKILL)
            self._nspawn.wait()


def _installation(work: Path) -> Path:
    """Return what the machine has as /opt/rlearner: an environment of the bound Python, packages
    and source.
    """
    folder = work / "installation"
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    version = f"python3.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    (site / "bound.pth").write_text("/opt/source\n/opt/packages\n")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (folder / "bin" / "python").symlink_to(f"/usr/bin/{version}")
    for name, module in PROGRAMS.items():
        file = folder / "bin" / name
        file.write_text(
            f"#!{PREFIX}/bin/python\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        file.chmod(0o755)
    shutil.copy(Path(sys.prefix, "bin", "nats-server"), folder / "bin" / "nats-server")
    return folder
