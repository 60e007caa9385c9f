"""A Slurm of its own on this machine: munged, slurmctld and a slurmd for each of several nodes, in
one folder.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from broker.system.children import spawn

PROGRAMS: Final = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scontrol",
    "scancel",
    "squeue",
)
NODES: Final = ("g1", "g2", "c1")
READY_WITHIN_S: Final = 60.0
CONFIGURATION: Final = """\
ClusterName=rlearner
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=15
MinJobAge=3600
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
{nodes}
PartitionName=gpu Nodes=g1,g2 Default=YES PriorityTier=1 GraceTime=30
PartitionName=cpu Nodes=c1 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=g1,g2,c1 PriorityTier=10
"""


def why_no_slurm() -> str:
    """Return why there can be no Slurm here, empty if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)}: make test-slurm installs them"
    return "" if os.geteuid() == 0 else "a Slurm of one's own needs root"


def free_ports(number: int) -> list[int]:
    """Return ports that are free now."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


class SlurmCluster:
    """Two nodes of the partition gpu, one of cpu, and urgent, whose jobs take the place of others.

    Every daemon runs in the foreground as a child of this process and ends with it.

    Args:
        folder: for everything; others must be able to enter it, as munge's clients do.
        environ: of jobs.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self.folder, self._daemons = folder, list[subprocess.Popen[bytes]]()
        self.environ = {**environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        host = socket.gethostname().partition(".")[0]
        own, *ports = free_ports(1 + len(NODES))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16"
            for name, port in zip(NODES, ports, strict=True)
        ]
        text = CONFIGURATION.format(host=host, port=own, folder=self.folder, nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = {
            "key-file": "munge.key",
            "socket": "munge.socket",
            "pid-file": "munged.pid",
            "seed-file": "munge.seed",
        }
        options = [f"--{name}={self.folder / file}" for name, file in munge.items()]
        try:
            self._start(
                "munged", "--foreground", f"--log-file={self.folder / 'munged.log'}", *options
            )
            self._wait(lambda: (self.folder / "munge.socket").exists())
            self._start("slurmctld", "-D")
            for name in NODES:
                (self.folder / f"spool-{name}").mkdir()
                self._start("slurmd", "-D", "-N", name)
            idle = {f"{name} idle" for name in NODES}
            shown = ("sinfo", "--noheader", "--Node", "--format=%N %t")
            self._wait(lambda: set(self.command(*shown, check=False).splitlines()) == idle)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for job in self.command("squeue", "-h", "-o", "%A", check=False).split():
            self.command("scancel", "--signal=KILL", "--full", job, check=False)
            self.command("scancel", job, check=False)
        deadline = time.monotonic() + 30
        while self.command("squeue", "-h", check=False).strip() and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start(self, program: str, *options: str) -> None:
        path = shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        assert path is not None
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(spawn([path, *options], log, env=self.environ))

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        deadline = time.monotonic() + READY_WITHIN_S
        while not condition():
            if time.monotonic() > deadline:
                said = {
                    file.name: file.read_text(errors="replace")[-2000:]
                    for file in self.folder.glob("*.log")
                }
                raise TimeoutError(f"Slurm does not start: {said}")
            time.sleep(0.1)

    def command(
        self, *words: str, check: bool = True, environ: Mapping[str, str] | None = None
    ) -> str:
        """Run one of Slurm's commands and return its output."""
        made = subprocess.run(
            words,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or made.returncode == 0, f"{' '.join(words)}: {made.stderr}"
        return made.stdout

    def version(self) -> str:
        """Return the version of Slurm, for example 22.05.8."""
        return self.command("sinfo", "--version").split()[-1]

    def submit(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """Submit a batch script and return the number of its job."""
        return self.command("sbatch", "--parsable", *words, environ=environ).strip()

    def shown(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` says, by name."""
        line = self.command("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", line))

    def states(self, jobs: Sequence[str]) -> list[str]:
        """Return the state of each job."""
        return [self.shown(job)["JobState"] for job in jobs]
