"""Code of environments, rewards and agents runs in processes that hold none of the hub's secrets."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from broker.settings.config import DomainSection, RewardConfig
from broker.system.children import spawn
from envhub.domain import load_domain
from envhub.workers.worker_pool import NoWorker, WorkerPools
from rewardhub.reward_processes import RewardProcesses
from rewardhub.rewards.base import Sample, Scored
from rewardhub.worker_pool import NoWorkerError, RewardWorkerPool, ScoreError
from rlearner_workers.environment import worker_environment
from rlearner_workers.frames import MAX_ANSWER_BYTES

SECRETS = {
    "RL_BROKER": "nats://ann:broker-password@10.0.0.1:4222",
    "RL_API_KEY": "secret-of-the-http-api",
    "HF_TOKEN": "hf_secret",
    "WANDB_API_KEY": "secret-of-wandb",
    "AWS_SECRET_ACCESS_KEY": "secret-of-aws",
    "JUDGE_KEY": "secret-of-the-judge",
    "SOME_VARIABLE": "not known to be harmless",
    "HTTPS_PROXY": "http://ann:proxy-password@proxy:3128",
}
THIEF = """
import json, os
from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, StepResult

def seen(folder):
    with open(os.path.join(folder, f"{os.getpid()}.json"), "w") as file:
        json.dump(dict(os.environ), file)

def score(sample, folder, api_key=""):
    seen(folder)
    return float(api_key == "secret-of-the-judge")

class Args(Section):
    folder: str

class Thief(Environment):
    Args = Args
    isolation = "process"

    def reset(self, task_index, split, seed):
        seen(self.args.folder)
        return Observation("?")

    def step(self, text):
        return StepResult(observation=Observation(""), reward=0.0, done=True)
"""


@pytest.fixture
def thief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LC_TIME", "C")
    (tmp_path / "thief.py").write_text(THIEF)
    (tmp_path / "seen").mkdir()
    return tmp_path


def stolen(thief: Path) -> dict[str, str]:
    """Return the secrets that reached a worker; asserts that it ran, and saw what it needs."""
    found = [json.loads(file.read_text()) for file in (thief / "seen").iterdir()]
    assert found
    assert all(one["PATH"] == os.environ["PATH"] and one["LC_TIME"] == "C" for one in found)
    return {name: one[name] for one in found for name in SECRETS if name in one}


SAMPLE = Sample(
    domain="d", task_index=0, prompt="p", response="r", reference="", reward=0.0, reward_parts={}, success=False,
    end="terminated", num_turns=1, num_tokens=1, metrics={},
)  # fmt: skip


async def play(thief: Path, *passed: str) -> None:
    section = DomainSection(env=f"{thief}/thief.py:Thief", env_args={"folder": str(thief / "seen")})
    pools = WorkerPools(None, passed)
    environment = await pools.environment(load_domain("d", section))
    await environment.constructor()
    await environment.reset(0, "train", 1)
    await environment.close()
    await pools.close()


async def score(thief: Path, **args: Any) -> Scored:
    reward = RewardConfig(
        name=f"{thief}/thief.py:score", args={"folder": str(thief / "seen"), **args}
    )
    pool = RewardWorkerPool(1, 30.0, [reward])
    await pool.start()
    found = await pool.score(reward, SAMPLE)
    await pool.close()
    return found


async def test_an_environment_sees_no_secret_of_its_hub(thief: Path) -> None:
    await play(thief)
    assert stolen(thief) == {}


async def test_an_environment_sees_what_the_user_passes_on(thief: Path) -> None:
    await play(thief, "SOME_VARIABLE", "MISSING")
    assert stolen(thief) == {"SOME_VARIABLE": "not known to be harmless"}


async def test_a_reward_sees_no_secret_of_its_hub(thief: Path) -> None:
    assert (await score(thief)).value == 0.0
    assert stolen(thief) == {}


async def test_a_reward_gets_the_secret_that_its_arguments_name_and_no_other(thief: Path) -> None:
    assert (await score(thief, api_key={"env": "JUDGE_KEY"})).value == 1.0
    assert stolen(thief) == {"JUDGE_KEY": "secret-of-the-judge"}


def test_the_list_of_passed_variables_lets_no_secret_through() -> None:
    names = (
        "PYTHON_API_KEY",
        "CUDA_TOKEN",
        "OMP_PASSWORD",
        "CONDA_SECRET",
        "HF_TOKEN",
        "LD_AUDIT",
        "XDG_RUNTIME_DIR",
    )
    environ = {
        **dict.fromkeys(names, "x"),
        "PYTHONPATH": "p",
        "https_proxy": "http://h:1",
        "HTTP_PROXY": "http://a:b@h",
    }
    assert worker_environment((), environ) == {"PYTHONPATH": "p", "https_proxy": "http://h:1"}


# ------------------------------------------------------------------------------------------- a
# hub's memory

SPY = """
import os, sys, time
from broker.system import children
hub = os.fork()
if not hub:
    os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
    children._PRCTL(4, 1, 0, 0, 0)  # as any process is that did not change its uid
    {hide}
    print("up", flush=True)
    time.sleep(60)
try:
    time.sleep(1)
    spy = os.fork()
    if not spy:
        os.setresgid(65534, 65534, 65534), os.setresuid(65534, 65534, 65534)
        try:
            print(b"PATH=" in open(f"/proc/{{hub}}/environ", "rb").read(), flush=True)
        except PermissionError as error:
            print("refused", flush=True)
        os._exit(0)
    os.waitpid(spy, 0)
finally:
    os.kill(hub, 9)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another uid")
@pytest.mark.parametrize("hides", [True, False])
def test_a_child_does_not_read_the_environment_of_its_hub(hides: bool) -> None:
    code = SPY.format(hide="children.hide_memory()" if hides else "")
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=60)
    # without hiding the attempt works
    assert done.stdout.split() == ["up", "refused" if hides else "True"]


# ------------------------------------------------------------------------------------ frames and
# endless output

LIE = """
import os, socket, struct

def lie(first, last):
    for fd in range(first, last):
        try:
            socket.socket(fileno=os.dup(fd)).sendall(struct.pack("<I", 0xFFFFFFFF) + b"x" * 65536)
        except OSError:
            pass
"""
LYING_REWARD = f"""{LIE}
def score(sample):
    lie(3, 64)
    return 1.0
"""
LYING_JUDGE = f"""{LIE}
import sys, time
lie(int(sys.argv[1]), int(sys.argv[1]) + 1)
time.sleep(60)
"""
LYING_ENVIRONMENT = f"""{LIE}{THIEF}
import sys

if sys.argv[1:] and sys.argv[1].isdigit():  # the forkserver's socket
    lie(int(sys.argv[1]), int(sys.argv[1]) + 1)
"""
TOO_LARGE = f"4294967295 bytes, the limit is {MAX_ANSWER_BYTES}"


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


async def test_an_announced_size_of_a_reward_reserves_no_memory(tmp_path: Path) -> None:
    (tmp_path / "liar.py").write_text(LYING_REWARD)
    reward = RewardConfig(name=f"{tmp_path}/liar.py:score")
    pool = RewardWorkerPool(1, 30.0, [reward])
    await pool.start()
    before = resident()
    with pytest.raises(ScoreError, match=TOO_LARGE):
        await pool.score(reward, SAMPLE)
    assert resident() - before < 32 << 20
    await pool.close()


async def test_an_announced_size_of_a_judge_reserves_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(
        module: str, theirs: socket.socket, output: IO[bytes], **_: object
    ) -> subprocess.Popen[bytes]:
        assert module == "rewardhub.reward_process"
        command = [sys.executable, "-c", LYING_JUDGE, str(theirs.fileno())]
        return spawn(command, output, pass_fds=(theirs.fileno(),), death_signal=signal.SIGKILL)

    monkeypatch.setattr("rlearner_workers.worker_process.start", start)
    hosts, before = RewardProcesses(), resident()
    with pytest.raises(NoWorkerError, match=TOO_LARGE):
        await hosts.score(
            RewardConfig(name="judge", args={"base_url": "http://127.0.0.1:1/v1"}), SAMPLE
        )
    assert resident() - before < 32 << 20
    await hosts.close()


async def test_an_announced_size_of_the_forkserver_reserves_no_memory(tmp_path: Path) -> None:
    (tmp_path / "liar_env.py").write_text(LYING_ENVIRONMENT)
    section = DomainSection(env=f"{tmp_path}/liar_env.py:Thief", env_args={"folder": str(tmp_path)})
    pools, domain, before = WorkerPools(None), load_domain("d", section), resident()
    with pytest.raises(NoWorker, match=TOO_LARGE):
        await pools.environment(domain)
    assert resident() - before < 32 << 20
    await pools.close()


# ----------------------------------------------------------------------------------------------
# their deaths


def test_a_command_that_does_not_exist_is_an_error_at_once(tmp_path: Path) -> None:
    with (
        (tmp_path / "out").open("wb") as out,
        pytest.raises(FileNotFoundError, match="no-such-program"),
    ):
        spawn(["no-such-program"], out)
    with (tmp_path / "out").open("wb") as out, pytest.raises(FileNotFoundError):
        spawn(["./tool"], out, cwd=str(tmp_path))
    (tmp_path / "tool").write_text("#!/bin/sh\necho here\n")
    (tmp_path / "tool").chmod(0o700)
    with (tmp_path / "out").open("wb") as out:
        assert spawn(["./tool"], out, cwd=str(tmp_path)).wait() == 0
    assert (tmp_path / "out").read_text() == "here\n"


PARENT = """
import os, sys, time
from broker.system.children import spawn
with open(os.devnull, "wb") as out:
    child = spawn([sys.executable, "-c", "import time; time.sleep(120)"], out)
print(child.pid, flush=True)
time.sleep({rest})
"""


@pytest.mark.parametrize("rest", [0.0, 60.0], ids=["that-ends-at-once", "that-is-killed"])
def test_a_child_dies_with_a_parent(rest: float) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(rest=rest)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    if rest:
        os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    ends = time.monotonic() + 20
    while psutil.pid_exists(child) and time.monotonic() < ends:
        time.sleep(0.05)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
