"""A run on a real Slurm: jobs that are cancelled, preempted, killed and out of time, and come back;
nothing is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from slurm_cluster import SlurmCluster, why_no_slurm
from slurm_run import CPU, GPU, TRUST, SlurmRun

ROOT: Final = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not os.environ.get("RL_SLURM"), reason="takes minutes: make test-slurm"),
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "there is a Slurm"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory(prefix="rlearner-slurm-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # munge's clients enter it
        environ = {
            "PATH": f"{sysconfig.get_path('scripts')}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        with SlurmCluster(folder, environ) as made:
            print(f"Slurm {made.version()}")
            yield made


def check_audit(run: SlurmRun, steps: int = 10) -> None:
    audit = run.audited()
    found = {name: audit[name] for name in ("code", "problems", "lost", "trained_twice", "open")}
    print(f"{run.name}: {found}, {audit['tickets']} tickets")
    assert found == {"code": 0, "problems": [], "lost": 0, "trained_twice": 0, "open": 0}
    assert (run.steps, audit["trained"]) == (steps, 4 * steps)


async def test_every_job_of_a_run_is_cancelled_and_requeued_once(slurm: SlurmCluster) -> None:
    run = SlurmRun(slurm, "lake")
    began = time.monotonic()
    broker, learner, *others = await run.submit_all(servers="0-1")
    for step, job in enumerate((learner, *others, broker), 1):
        await run.past(step)
        slurm.command("scancel", job)
        await run.in_state("CANCELLED", job)
        slurm.command("scontrol", "requeue", job)
        await run.requeued(job)
    run.hurry()
    await run.in_state("COMPLETED", learner, *others)
    print(f"{run.name}: {time.monotonic() - began:.0f} s")
    check_audit(run)
    slurm.command("scancel", broker)


async def test_preemption_the_time_limit_a_rival_and_a_kill_in_a_checkpoint(
    slurm: SlurmCluster,
) -> None:
    """The learner has two nodes, and a rank on each."""
    run = SlurmRun(slurm, "wide")
    ranks = (
        "train.backend=ddp",
        "train.ranks=2",
        "--rendezvous",
        "127.0.0.1:7199",
        "checkpoint.every_steps=1",
        "train.steps=40",
    )
    limit = (*GPU, "--nodes=2", "--time=60", "--signal=B:USR1@50")
    broker, learner, *others = await run.submit_all(*ranks, learner=limit)

    await run.past(1)
    rival = run.submit("learner", *run.lake, options=GPU)
    await run.in_state("FAILED", rival)
    assert slurm.shown(rival)["ExitCode"] == "2:0"
    assert f"(Slurm job {learner}); --take-over takes it over" in run.log("learner")

    hours, minutes, _ = slurm.shown(learner)["RunTime"].split(":")
    slurm.command(
        "scontrol", "update", f"JobId={learner}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}"
    )
    await run.requeued(learner)  # Slurm sent USR1 before its time was over
    slurm.command("scontrol", "update", f"JobId={learner}", "TimeLimit=60")
    assert "the time limit is near: this job drains, and is requeued" in run.log("learner")
    assert "exit code 130; requeued" in run.log("learner")
    # the signal to all processes ends no rank before its time
    assert "is gone" not in run.log("learner")

    steps = run.steps
    await run.past(steps + 1)
    urgent = slurm.submit(
        "--partition=urgent", "--nodelist=c1", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    await run.requeued(broker, *others[1:])  # they were on c1
    assert slurm.states([urgent]) == ["COMPLETED"]

    steps = run.steps
    await run.past(steps + 1)
    await kill_in_checkpoint(run, learner)
    slurm.command("scontrol", "requeue", learner)
    await run.requeued(learner, times=2)
    run.hurry()
    await run.in_state("COMPLETED", learner, *others)
    check_audit(run, 40)
    slurm.command("scancel", broker)


async def kill_in_checkpoint(run: SlurmRun, learner: str) -> None:
    """Kill the step while it writes a checkpoint, and check that it left a part of one."""
    pid = run.pid(learner, "start")
    async with asyncio.timeout(60):
        while True:
            if list((run.folder / "checkpoints").glob(".step-*")):
                os.kill(pid, signal.SIGSTOP)
                if list((run.folder / "checkpoints").glob(".step-*")):
                    break
                os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.001)
    run.slurm.command("scancel", "--signal=KILL", learner)


@pytest.mark.parametrize("kind", ["plain", "heterogeneous"])
async def test_a_whole_run_in_one_allocation_is_requeued(slurm: SlurmCluster, kind: str) -> None:
    """By its script when the time limit is near, and then by an operator, who lets Slurm signal the
    broker, too.
    """
    run = SlurmRun(slurm, kind)
    del run.environ["RL_BROKER"]
    run.environ |= {f"RL_{role}_OPTIONS": TRUST for role in ("SERVER", "ENVHUB", "REWARDHUB")}
    if kind == "plain":
        job = run.submit("run", *run.lake, options=(*GPU, "--nodes=2"))
    else:
        job = run.submit("run", *run.lake, options=GPU, more=(":", *GPU, ":", *CPU))
    await run.past(2)
    slurm.command("scancel", "--batch", "--signal=USR1", job)
    await run.requeued(job)
    await run.past(run.steps + 1)
    slurm.command("scontrol", "requeue", job)
    await run.requeued(job, times=2)
    run.hurry()
    await run.in_state("COMPLETED", job)
    assert "exit code 130; requeued" in run.log("run")
    check_audit(run)


async def test_a_whole_run_ends_where_the_user_must_act(slurm: SlurmCluster) -> None:
    """Servers that may not load the run's reward; a port in use. Neither is requeued."""
    run = SlurmRun(slurm, "refused")
    job = run.submit("run", *run.lake, options=GPU)
    await run.in_state("FAILED", job)
    said = "\n".join(file.read_text() for file in (run.shared / "logs").iterdir())
    assert (
        "run refused runs code of its own or weakens isolation (domains.lake.rewards.0.name)"
        in said
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run.environ["RL_PORT"] = str(taken.getsockname()[1])
        again = run.submit("run", *run.lake, options=GPU)
        await run.in_state("FAILED", again)
    assert f"port {run.environ['RL_PORT']} on 127.0.0.1 is already in use" in run.log("run")
    assert [
        (slurm.shown(one)["ExitCode"], slurm.shown(one)["Restarts"]) for one in (job, again)
    ] == [("2:0", "0")] * 2


@pytest.mark.parametrize("script", ["servers", "envhubs", "rewardhubs"])
async def test_a_job_without_its_token_fails_at_once(slurm: SlurmCluster, script: str) -> None:
    run = SlurmRun(slurm, f"none-{script}")
    role = {"servers": "rollout", "envhubs": "envhub", "rewardhubs": "rewardhub"}[script]
    missing, exposed = (
        run.shared / f"{role}.token",
        "other users can read this join token; run chmod 600",
    )
    job = run.submit(script, options=CPU)
    await run.in_state("FAILED", job)
    said = run.log(script).splitlines()
    assert said == [
        f"error: {missing}: no join token; `rlearner invite {role} --run {run.name} --out {missing} --broker URL` "
        "writes it on the broker's node"
    ]
    missing.write_text("{}")
    missing.chmod(0o640)
    again = run.submit(script, options=CPU)
    await run.in_state("FAILED", again)
    assert exposed in run.log(script)
    assert [slurm.shown(one)["ExitCode"] for one in (job, again)] == ["2:0", "2:0"]
    assert [slurm.shown(one)["Restarts"] for one in (job, again)] == ["0", "0"]
