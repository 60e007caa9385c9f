"""What a run leaves behind holds no secret: folder, store, output, trackers and the broker's
process.

A reward function prints its key, returns it in an exception and names it in a note, as careless
code of users does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SECRETS = {
    "JUDGE_KEY": "juniper-velvet-4711",
    "HF_TOKEN": "hf_" + "Qz7" * 11,
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
}
REWARD = """
import os, sys

def score(sample, api_key):
    print("calling with", api_key, file=sys.stderr, flush=True)
    if sample.task_index % 2:
        raise RuntimeError(f"GET https://judge.host/v1?api_key={api_key} answered 500")
    return len(api_key) / 100
"""
SETTINGS = [
    "configs/quickstart.yaml",
    "run.name=secrets",
    "model.tiny={hidden_size: 16, num_layers: 1, num_heads: 1, num_kv_heads: 1, head_dim: 16, intermediate_size: 32, "
    "vocab: chars}",
    "warm_start.steps=0",
    "eval.every_steps=0",
    "domains.lake.group_size=2",
    "domains.lake.max_turns=2",
    "train.groups_per_step=1",
    "train.steps=2",
    "trackers.use=[tensorboard]",
]


@dataclass(frozen=True)
class Traces:
    """What a run left behind.

    Attributes:
        output: of ``rlearner up``.
        broker_environment: of its nats-server, while it ran.
    """

    folder: Path
    output: bytes
    broker_environment: bytes
    exit_code: int


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "mine.py").write_text(REWARD)
    judge = f"{{name: '{folder}/mine.py:score', args: {{api_key: {{env: JUDGE_KEY}}}}}}"
    command = [sys.executable, "-m", "rlearner.cli", "up", *SETTINGS, f"run.dir={folder}/runs"]
    command.append(f"domains.lake.rewards=[{judge}]")
    out = folder / "output"
    with out.open("wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **SECRETS})
        try:
            environment = b""
            while child.poll() is None:
                environment = _environment_of_broker(child.pid) or environment
                time.sleep(0.3)
        finally:
            child.kill()
            child.wait()
    return Traces(folder / "runs", out.read_bytes(), environment, child.returncode)


def _environment_of_broker(parent: int) -> bytes:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            status = (process / "status").read_text()
            if f"PPid:\t{parent}\n" in status and "nats-server" in status.splitlines()[0]:
                return (process / "environ").read_bytes()
        except OSError:
            continue
    return b""


def _holders(folder: Path, secret: str) -> Iterator[str]:
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink() and secret.encode() in file.read_bytes():
            yield str(file.relative_to(folder))


def test_the_function_got_its_key_and_failed_where_it_should(traces: Traces) -> None:
    assert traces.exit_code == 0, traces.output.decode()
    logs = b"".join(file.read_bytes() for file in traces.folder.rglob("*.log"))
    assert b"calling with ***" in logs
    assert b"api_key=*** answered 500" in logs + traces.output


@pytest.mark.parametrize("name", sorted(SECRETS))
def test_no_file_of_the_run_and_its_broker_holds_it(name: str, traces: Traces) -> None:
    assert list(_holders(traces.folder, SECRETS[name])) == []
    assert list(_holders(traces.folder, "juniper")) == []


def test_the_reference_stands_where_the_secret_would(traces: Traces) -> None:
    text = (traces.folder / "secrets" / "config.yaml").read_text()
    assert "env: JUDGE_KEY" in text


def test_the_output_holds_none(traces: Traces) -> None:
    for secret in SECRETS.values():
        assert secret.encode() not in traces.output


def test_the_broker_was_started_without_them(traces: Traces) -> None:
    assert b"PATH=" in traces.broker_environment
    for name in SECRETS:
        assert f"{name}=".encode() not in traces.broker_environment
