"""A run of deploy/slurm on a ``SlurmCluster``, paced by its reward."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil
from slurm_cluster import SlurmCluster
from waits import until

from bench.support.fleet import free_port

SCRIPTS: Final = Path(__file__).resolve().parents[2] / "deploy" / "slurm"
WITHIN_S: Final = 240.0
TINY: Final = "{hidden_size: 32, num_layers: 2, num_heads: 2, num_kv_heads: 2, head_dim: 16, intermediate_size: 64, vocab: chars}"
LAKE: Final = (
    "configs/frozenlake.yaml", f"model.tiny={TINY}", "warm_start.steps=0", "eval.every_steps=0", "train.steps=10",
    "train.groups_per_step=4", "domains.lake.group_size=4", "domains.lake.min_group_size=4", "domains.lake.max_turns=6",
    "checkpoint.every_steps=2", "samples.keep=true", "rewardhub.workers=1",
)  # fmt: skip
EPISODES: Final = 16  # of a step
# A reward hub takes this long for each episode, which keeps the run from being over too soon,
# without any load.
REWARD: Final = """import time
from pathlib import Path


def paced(sample):
    time.sleep(float((Path(__file__).parent / "pace").read_text()))
    return 0.0
"""
TRUST: Final = "--trust-run-code"  # the reward is a file
CPU: Final = ("--partition=cpu",)
GPU: Final = ("--partition=gpu",)


class SlurmRun:
    """A run of ten steps on frozen lakes whose processes are jobs.

    Args:
        step_s: how long a step takes at least, until ``hurry``.
    """

    def __init__(self, slurm: SlurmCluster, name: str, *, step_s: float = 8.0) -> None:
        self.slurm, self.name = slurm, name
        self.shared = slurm.folder / f"{name}.jobs"
        self.folder = slurm.folder / "runs" / name
        self.code = slurm.folder / f"{name}.code"
        self.code.mkdir()
        (self.code / "paced_reward.py").write_text(REWARD)
        self._pace(step_s / EPISODES)
        self.lake = (*LAKE, f"domains.lake.rewards=[{{name: '{self.code}/paced_reward.py:paced'}}]")
        self.url = f"nats://127.0.0.1:{free_port()}"
        self.environ = {"RL_RUN": name, "RL_BROKER": self.url, "RL_JOBS": str(self.shared)}

    def _pace(self, seconds: float) -> None:
        new = self.code / "pace.new"
        new.write_text(str(seconds))
        new.rename(self.code / "pace")

    def hurry(self) -> None:
        """Take no longer than necessary from now on."""
        self._pace(0.0)

    def submit(
        self, script: str, *words: str, options: tuple[str, ...] = (), more: tuple[str, ...] = ()
    ) -> str:
        """Submit a script of deploy/slurm.

        Args:
            more: options of further components of a heterogeneous job.
        """
        place = (
            f"--chdir={self.slurm.folder}",
            f"--output={self.slurm.folder}/{self.name}-{script}-%j.log",
        )
        submitted = (*place, *options, *more, str(SCRIPTS / f"{script}.sbatch"), *words)
        return self.slurm.submit(*submitted, environ=self.environ)

    async def submit_all(
        self, *settings: str, learner: tuple[str, ...] = GPU, servers: str = "0"
    ) -> list[str]:
        """Submit a job of every kind and return them: broker, learner, servers, environment hub,
        reward hub.
        """
        broker = self.submit("broker", options=CPU)
        await until(lambda: len(list(self.shared.glob("*.token"))) == 3, WITHIN_S)
        jobs = [broker, self.submit("learner", *self.lake, *settings, options=learner)]
        array = self.submit("servers", TRUST, options=(*GPU, f"--array={servers}"))
        jobs += [f"{array}_{task}" for task in servers.replace("-", "")]
        jobs.append(self.submit("envhubs", TRUST, options=CPU))
        jobs.append(self.submit("rewardhubs", TRUST, options=CPU))
        return jobs

    def log(self, script: str) -> str:
        """Return what the jobs of a script have printed."""
        files = sorted(self.slurm.folder.glob(f"{self.name}-{script}-*.log"))
        return "\n".join(file.read_text(errors="replace") for file in files)

    @property
    def steps(self) -> int:
        """Steps made so far."""
        file = self.folder / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0

    async def past(self, step: int) -> None:
        """Return once a step is made."""
        await until(lambda: self.steps >= step, WITHIN_S)

    async def in_state(self, state: str, *jobs: str) -> None:
        """Return once all the jobs are in a state."""
        try:
            await until(lambda: self.slurm.states(jobs) == [state] * len(jobs), WITHIN_S)
        except TimeoutError:
            logs = {
                script.stem: self.log(script.stem)[-1500:] for script in SCRIPTS.glob("*.sbatch")
            }
            raise AssertionError(
                f"{jobs} are {self.slurm.states(jobs)}, not {state}: {logs}"
            ) from None

    async def requeued(self, *jobs: str, times: int = 1) -> None:
        """Return once the jobs run again.

        A heterogeneous job is started only by the backfill scheduler, which waits for some change
        if nothing else is going on.
        """
        await until(
            lambda: all(self.slurm.shown(job).get("Restarts") == str(times) for job in jobs),
            WITHIN_S,
        )
        async with asyncio.timeout(WITHIN_S):
            while self.slurm.states(jobs) != ["RUNNING"] * len(jobs):
                await asyncio.sleep(2.0)
                for job in jobs:
                    self.slurm.command(
                        "scontrol", "update", f"JobId={job}", "Comment=still waiting", check=False
                    )

    def pid(self, job: str, word: str) -> int:
        """Return the process of a job that has a word in its command line, and is not srun."""
        for process in psutil.process_iter(["cmdline", "environ"]):
            words, environ = process.info["cmdline"] or [], process.info["environ"] or {}
            if environ.get("SLURM_JOB_ID") == job and word in words and "python" in words[0]:
                return int(process.pid)
        raise LookupError(f"no {word} of job {job}")

    def audited(self) -> dict[str, Any]:
        """Return what `rlearner audit` finds, with its exit code as ``code``; by the broker if it
        still runs.
        """
        command = [sys.executable, "-m", "rlearner.cli", "audit", str(self.folder), "--json"]
        environ = {**os.environ, **self.slurm.environ}
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.stdout.startswith("{"), done.stderr
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures | {"code": done.returncode}
