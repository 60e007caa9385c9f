"""The batch scripts of deploy/slurm with stand-ins for Slurm's commands and ours: real processes,
real signals.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from waits import until

SCRIPTS: Final = Path(__file__).resolve().parents[3] / "deploy" / "slurm"
STAND_INS: Final = {
    "scontrol": """case $1 in
    requeue) [ ! -e refuses ] || exit 1; echo "requeue $2" >>said ;;
    show) cat job ;;
esac""",
    # like Slurm's, it reaches steps and not the batch script
    "scancel": """echo "scancel $*" >>said; for step in steps/*; do kill -TERM "$(basename "$step")"; done""",
    "srun": """while [[ $1 == --* ]]; do shift; done; touch "steps/$$"; exec "$@" """,
    # Each start takes the next line of `lives`: an exit code, or `serve N` to end with N at a
    # SIGTERM.
    "program": """echo "$(basename "$0") $*" >>said
read -r life code <lives; sed -i 1d lives
[ "$life" = serve ] || exit "$life"
trap 'exit $code' TERM; touch serving; while :; do sleep 0.02; done""",
}
PROGRAMS: Final = ("envhub", "rewardhub", "rollout-server", "rlearner", "broker")


class Job:
    """A batch script in a folder of its own, as Slurm starts it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process = folder, None
        (folder / "bin").mkdir()
        (folder / "steps").mkdir()
        self.shared = folder / "jobs"
        self.shared.mkdir()
        for name, text in STAND_INS.items():
            for file in [
                folder / "bin" / each for each in (PROGRAMS if name == "program" else (name,))
            ]:
                file.write_text(f"#!/usr/bin/env bash\n{text}\n")
                file.chmod(0o755)
        for role in ("rollout", "envhub", "rewardhub"):
            (self.shared / f"{role}.token").touch(0o600)
        self.state()
        self.environ = {
            "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
            "RL_RUN": "lake", "RL_JOBS": str(self.shared), "RL_BROKER": "tls://10.0.0.1:4222", "RL_PAUSE_S": "0.05",
        }  # fmt: skip

    def state(
        self, state: str = "RUNNING", preempted: str = "None", script: str = "envhubs"
    ) -> None:
        """What `scontrol show job` says from now on."""
        line = f"JobId=7 JobName=x JobState={state} Reason=None PreemptTime={preempted} Command={SCRIPTS}/{script}.sbatch"
        (self.folder / "job").write_text(f"{line} WorkDir=/\n")

    def start(self, *lives: str, script: str = "envhubs", words: tuple[str, ...] = ()) -> None:
        """Start a script; its program lives these lives one after another."""
        self.state(script=script)
        (self.folder / "lives").write_text("".join(f"{life}\n" for life in lives))
        self.process = subprocess.Popen(
            ["bash", str(SCRIPTS / f"{script}.sbatch"), *words],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    async def serving(self) -> None:
        await until((self.folder / "serving").exists)

    def signal(self, number: signal.Signals) -> None:
        """Signal the script alone."""
        self.process.send_signal(number)

    def preempt(self) -> None:
        """Signal the steps alone, as Slurm does at the start of a grace time."""
        self.state(preempted="2026-11-25T14:59:10")
        for step in (self.folder / "steps").iterdir():
            os.kill(int(step.name), signal.SIGTERM)

    def ended(self) -> tuple[int, str]:
        """Return the exit code and what it printed."""
        output, _ = self.process.communicate(timeout=30)
        return self.process.returncode, output

    @property
    def said(self) -> list[str]:
        """What programs and Slurm's commands were called with, in order."""
        file = self.folder / "said"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="no shellcheck: make test-slurm installs it"
)
def test_shellcheck_finds_nothing() -> None:
    files = [*SCRIPTS.glob("*.sbatch"), SCRIPTS / "common.sh"]
    found = subprocess.run(
        ["shellcheck", "-x", *files], capture_output=True, text=True, check=False
    )
    assert (len(files), found.stdout, found.returncode) == (7, "", 0)


@pytest.mark.parametrize(
    ("lives", "code", "starts"),
    [
        (["0"], 0, 1),  # all steps are done, or it was asked to stop
        (["2"], 2, 1),  # the user must act
        (["130"], 0, 1),  # a user stopped it
        (["137", "1", "0"], 0, 3),  # killed, crashed, back
        (["1"] * 9, 1, 6),
    ],
)
def test_exit_codes_without_a_signal(job: Job, lives: list[str], code: int, starts: int) -> None:
    job.start(*lives, words=("--n", "512"))
    assert job.ended()[0] == code
    assert job.said == [f"envhub --n 512 --join {job.shared}/envhub.token"] * starts


@pytest.mark.parametrize("code", ["0", "130", "1"])
async def test_at_the_time_limit_steps_drain_and_the_job_is_requeued(job: Job, code: str) -> None:
    job.start(f"serve {code}")
    await job.serving()
    job.signal(signal.SIGUSR1)
    exit_code, output = job.ended()
    assert (exit_code, job.said[1:]) == (0, ["scancel --signal=TERM 7", "requeue 7"])
    assert "the time limit is near: this job drains, and is requeued" in output
    assert f"exit code {code}; requeued" in output


@pytest.mark.parametrize(
    ("code", "then"), [("0", (0, ["requeue 7"])), ("130", (0, ["requeue 7"])), ("2", (2, []))]
)
async def test_a_preempted_job_is_requeued_unless_the_user_must_act(
    job: Job, code: str, then: tuple[int, list[str]]
) -> None:
    """Slurm counts a job that ends within its grace time as completed."""
    job.start(f"serve {code}")
    await job.serving()
    job.preempt()
    assert (job.ended()[0], job.said[1:]) == then


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED"])
async def test_what_slurm_ends_gets_no_second_signal_and_is_not_requeued(
    job: Job, state: str
) -> None:
    """Slurm signals the steps itself, and requeues the job itself after `scontrol requeue`."""
    job.start("serve 130")
    await job.serving()
    job.state(state)
    job.signal(signal.SIGTERM)
    for step in (job.folder / "steps").iterdir():
        os.kill(int(step.name), signal.SIGTERM)
    assert (job.ended()[0], job.said[1:]) == (130, [])


async def test_a_signal_to_the_script_alone_drains_and_ends_the_job(job: Job) -> None:
    job.start("serve 130")
    await job.serving()
    job.signal(signal.SIGTERM)
    exit_code, output = job.ended()
    assert (exit_code, job.said[1:]) == (0, ["scancel --signal=TERM 7"])
    assert "stopped by a user" in output


async def test_nothing_is_requeued_after_the_last_step(job: Job) -> None:
    job.start("serve 0")
    await job.serving()
    (job.shared / "finished").touch()
    job.signal(signal.SIGUSR1)
    assert (job.ended()[0], job.said[1:]) == (0, ["scancel --signal=TERM 7"])
    again = job.said
    job.start("0")
    code, output = job.ended()
    assert (code, job.said) == (0, again)
    assert "all steps of run lake are done: there is nothing to join" in output


async def test_a_job_that_cannot_be_requeued_says_so(job: Job) -> None:
    (job.folder / "refuses").touch()
    job.start("serve 130")
    await job.serving()
    job.signal(signal.SIGUSR1)
    code, output = job.ended()
    assert (code, "exit code 130; could not be requeued" in output) == (1, True)


# ------------------------------------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("script", "words", "change", "line"),
    [
        ("envhubs", (), {"RL_RUN": ""}, "RL_RUN: not set; sbatch --export=ALL,RL_RUN=... names the run"),
        ("envhubs", (), {"RL_RUN": "a b"}, "RL_RUN: 'a b' is not allowed; 1-64 letters, digits, '_' or '-'"),
        ("learner", (), {}, "learner.sbatch: no configuration; sbatch learner.sbatch CONFIG [key=value]..."),
        (
            "learner", ("a.yaml",), {"RL_BROKER": ""},
            "RL_BROKER: not set; sbatch --export=ALL,RL_BROKER=... names the address of its broker, for example "
            "tls://10.0.0.1:4222",
        ),
        (
            "broker", (), {"RL_BROKER": "svc1"},
            "RL_BROKER: 'svc1' is not allowed; one address with a port, for example tls://10.0.0.1:4222",
        ),
        ("run", (), {}, "run.sbatch: no configuration; sbatch run.sbatch CONFIG [key=value]..."),
    ],
)  # fmt: skip
def test_bad_settings_get_one_line(
    job: Job, script: str, words: tuple[str, ...], change: dict[str, str], line: str
) -> None:
    job.environ |= change
    job.start("0", script=script, words=words)
    assert job.ended() == (2, f"error: {line}\n")
    assert job.said == []


@pytest.mark.parametrize(
    ("script", "role"), [("servers", "rollout"), ("envhubs", "envhub"), ("rewardhubs", "rewardhub")]
)
def test_a_job_without_its_token_gets_one_line(job: Job, script: str, role: str) -> None:
    file = job.shared / f"{role}.token"
    file.chmod(0o640)
    job.start("0", script=script)
    assert job.ended() == (
        2,
        f"error: {file}: other users can read this join token; run chmod 600 {file}\n",
    )
    file.unlink()
    job.start("0", script=script)
    advice = f"`rlearner invite {role} --run lake --out {file} --broker URL` writes it on the broker's node"
    assert job.ended() == (2, f"error: {file}: no join token; {advice}\n")
    assert job.said == []


@pytest.mark.parametrize(
    ("devices", "words", "options"),
    [
        ("0,3", (), " --gpus 0,3"),
        ("0,3", ("--gpus", "3"), ""),  # as the user asks
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", (), ""),
        ("", (), ""),
    ],
)
def test_servers_use_the_gpus_of_their_job(
    job: Job, devices: str, words: tuple[str, ...], options: str
) -> None:
    job.environ["CUDA_VISIBLE_DEVICES"] = devices
    job.start("0", script="servers", words=words)
    assert job.ended()[0] == 0
    given = "".join(f" {word}" for word in words)
    assert job.said == [f"rollout-server{given} --join {job.shared}/rollout.token{options}"]


def test_a_learner_notes_that_the_run_is_finished_only_if_it_is(job: Job) -> None:
    finished, invited = job.shared / "finished", "rlearner invited --broker tls://10.0.0.1:4222"
    (job.shared / "finished").touch()
    for life, noted in (("2", False), ("0", True)):
        started = len(job.said)
        job.start("0", "0", life, script="learner", words=("a.yaml", "train.steps=5"))
        assert job.ended()[0] == int(life)
        command = "rlearner start a.yaml train.steps=5 run.name=lake --broker tls://10.0.0.1:4222"
        assert job.said[started:] == [invited, invited, command]
        assert finished.exists() is noted
