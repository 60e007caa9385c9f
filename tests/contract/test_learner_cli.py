"""The command rlearner as a user meets it: real processes, exit codes, one clear line for bad input."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import learner_fleet as fleet
import pytest
import yaml

from broker import wire
from broker.jetstream import Bus
from broker.runspec import validate
from learner import checkpoint
from learner.prepare import to_yaml

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def rlearner(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "learner.cli", *arguments], capture_output=True, text=True, timeout=60, env=ENV, check=False
    )


def test_check_prints_the_whole_configuration() -> None:
    done = rlearner("check", "configs/quickstart.yaml", "train.steps=7", "run.name=mine")
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert (printed["train"]["steps"], printed["run"]["name"], printed["train"]["on_late"]) == (7, "mine", "wait")
    assert validate(printed) == printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "no-such.yaml"], "no-such.yaml: no such file"),
        (["check", "configs/quickstart.yaml", "train.stepz=3"], "train.stepz: 3 is not allowed; unknown key, did you mean 'train.steps'?"),
        (["check", "configs/quickstart.yaml", "train.steps=0"], "train.steps: 0 is not allowed; "),
        (["check", "configs/quickstart.yaml", "domains.lake.env=pond"], "frozenlake"),
        (["check", "configs/quickstart.yaml", "rollout.engine=vlm"], "hf"),
        (["start", "configs/quickstart.yaml", "algorithm.pg_variant=pppo"], "algorithm.pg_variant: 'pppo' is not allowed"),
        (["start", "configs/quickstart.yaml", "model.path=/no/such/model"], "model.path: '/no/such/model' is not allowed; no such folder"),
        (["start", "configs/quickstart.yaml", "nonsense"], "override 'nonsense' is not allowed; write key=value"),
        (["start", "configs/quickstart.yaml", "run=5"], "run: 5 is not allowed; expected a mapping"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = rlearner(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert "Traceback" not in done.stderr


def test_an_unreachable_broker_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    arguments = ["--broker", "nats://127.0.0.1:9", "--connect-deadline", "0.5", f"run.dir={tmp_path}", "run.name=x"]
    done = rlearner("start", "configs/quickstart.yaml", *arguments)  # key=value after options too
    assert done.returncode == 2
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_nothing_heavy_is_imported_for_the_command_line() -> None:
    code = "import sys, learner.cli, learner.config, learner.service; print({'torch', 'transformers', 'gymnasium'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


async def test_sigterm_leaves_a_checkpoint_and_exit_code_0(bus: Bus, broker_url: str, run_name: str, tmp_path: Path) -> None:
    config = fleet.config(str(tmp_path), run_name, train={"steps": 1000, "groups_per_step": 2, "max_staleness": 1})
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    log = tmp_path / "learner.log"
    command = [sys.executable, "-m", "learner.cli", "start", str(file), "--broker", broker_url]
    seen = asyncio.Event()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 12:
            seen.set()
        return [fleet.group(ticket, ticket.min_version)]

    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=ENV)
    try:
        async with fleet.Hub(bus, answer), asyncio.timeout(60):
            await seen.wait()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Traceback" not in log.read_text()
    lines = [json.loads(line) for line in (tmp_path / run_name / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    newest = checkpoint.newest(tmp_path / run_name / "checkpoints")
    assert newest is not None
    assert newest.step == lines[-1]["step"]
