"""The command rlearner as a user meets it: real processes, exit codes, one clear line for bad
input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import learner_fleet as fleet
import pytest
import yaml
from declared_metrics import undeclared

from broker.contract import wire
from broker.contract.streams import TICKETS
from broker.jetstream.bus import Bus
from broker.settings.runspec import validate
from learner.checkpoints import checkpoint
from learner.prepare import to_yaml
from rlearner.cli import main

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def rlearner(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlearner.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENV,
        check=False,
    )


def test_check_prints_the_whole_configuration() -> None:
    done = rlearner("check", "--all", "configs/quickstart.yaml", "train.steps=7", "run.name=mine")
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert (printed["train"]["steps"], printed["run"]["name"], printed["train"]["on_late"]) == (
        7,
        "mine",
        "wait",
    )
    assert validate(printed) == printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such.yaml"], "no-such.yaml: no such file"),
        (
            ["configs/quickstart.yaml", "train.stepz=3"],
            "train.stepz: 3 is not allowed; unknown key, did you mean 'train.steps'?",
        ),
        (["configs/quickstart.yaml", "train.steps=0"], "train.steps: 0 is not allowed; "),
        (["configs/quickstart.yaml", "domains.lake.env=pond"], "frozenlake"),
        (["configs/quickstart.yaml", "rollout.engine=vlm"], "hf"),
        (
            ["configs/quickstart.yaml", "model.path=/no/such/model"],
            "model.path: '/no/such/model' is not allowed; no such folder",
        ),
        (
            ["configs/quickstart.yaml", "nonsense"],
            "override 'nonsense' is not allowed; write key=value",
        ),
        (["configs/quickstart.yaml", "run=5"], "run: 5 is not allowed; expected a mapping"),
        (["configs/quickstart.yaml", "run.dir=README.md"], "README.md is a file"),
    ],
)
def test_check_says_in_one_line_what_is_wrong(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_start_refuses_bad_input_with_one_line_and_exit_code_2() -> None:
    done = rlearner("start", "configs/quickstart.yaml", "algorithm.pg_variant=pppo")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(
        "error: algorithm.pg_variant: 'pppo' is not allowed; did you mean 'ppo'?"
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [["up", "x.yaml", "--no-such"], ["no-such-command"], []])
def test_unknown_options_and_commands_are_usage_errors(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: rlearner: ")
    assert printed.err.endswith("; see rlearner --help\n")
    assert printed.err.count("\n") == 1


def test_an_unreachable_broker_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    arguments = [
        "--broker",
        "nats://127.0.0.1:9",
        "--connect-deadline",
        "0.5",
        f"run.dir={tmp_path}",
        "run.name=x",
    ]
    done = rlearner("start", "configs/quickstart.yaml", *arguments)  # key=value after options too
    assert done.returncode == 2
    assert "127.0.0.1:9" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_nothing_heavy_is_imported_for_the_command_line() -> None:
    code = (
        "import sys, rlearner.cli, learner.config, learner.service; print({'torch', 'transformers', 'gymnasium'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


async def test_sigterm_leaves_a_checkpoint_and_exit_code_130(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    config = fleet.config(
        str(tmp_path), run_name, train={"steps": 1000, "groups_per_step": 2, "max_staleness": 1}
    )
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config))
    log = tmp_path / "learner.log"
    command = [sys.executable, "-m", "rlearner.cli", "start", str(file), "--broker", broker_url]
    seen = asyncio.Event()

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 12:
            seen.set()
        return [fleet.group(ticket, ticket.min_version)]

    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=output, stderr=output, env=ENV
        )
    try:
        async with fleet.Hub(bus, answer), asyncio.timeout(120):
            await seen.wait()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 130, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert "Traceback" not in log.read_text()
    lines = [
        json.loads(line)
        for line in (tmp_path / run_name / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert undeclared(name for line in lines for name in line) == set()
    newest = checkpoint.newest_checkpoint(tmp_path / run_name / "checkpoints")
    assert newest is not None
    assert newest.step == lines[-1]["step"]


async def test_kill_9_and_resume_trains_every_ticket_once(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path
) -> None:
    train = {"steps": 8, "groups_per_step": 2, "max_staleness": 1}
    file = tmp_path / "run.yaml"
    file.write_text(
        to_yaml(fleet.config(str(tmp_path), run_name, train=train, checkpoint={"every_steps": 3}))
    )
    command = [sys.executable, "-m", "rlearner.cli", "start", str(file), "--broker", broker_url]
    killed: list[int] = []
    process: asyncio.subprocess.Process | None = None

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 12 and not killed:
            assert process is not None
            while not (tmp_path / run_name / "checkpoints" / "step-000003").exists():
                time.sleep(0.01)  # it is written while training goes on
            process.kill()
            killed.append(ticket.min_version)
        if ticket.number == 5:
            return [
                wire.Closed(
                    ticket=5, domain="lake", reason="env_error", detail="it broke", by="made-up"
                )
            ]
        return [fleet.group(ticket, ticket.min_version)]

    async with fleet.Hub(bus, answer) as hub, asyncio.timeout(240):
        for expected in (-signal.SIGKILL, 0):
            with (tmp_path / "learner.log").open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=output, stderr=output, env=ENV
                )
            assert await process.wait() == expected, (tmp_path / "learner.log").read_text()
    assert killed == [4]  # after the checkpoint of step 3
    # 16 and the replacement, each delivered once
    assert [ticket.number for ticket in hub.tickets] == list(range(1, 18))
    assert await bus.last_seq(TICKETS) == 17
    lines = [
        json.loads(line)
        for line in (tmp_path / run_name / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, 9))
    last = lines[-1]
    assert [
        last[f"ticket/{name}"]
        for name in ("issued", "trained", "filtered", "dropped", "dead", "open")
    ] == [
        17,
        16,
        0,
        0,
        1,
        0,
    ]
    assert "resuming from" in (tmp_path / "learner.log").read_text()


def test_killed_in_the_warm_start_the_next_life_makes_it_anew(
    broker_url: str, run_name: str, tmp_path: Path
) -> None:
    """The model and the demonstrations are there then, so two threads come to import transformers
    at once.
    """
    rows = [
        [{"role": "user", "content": letter}, {"role": "assistant", "content": "U"}]
        for letter in "abcd"
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    warm = {"steps": 400, "data": str(tmp_path / "rows.jsonl"), "batch_size": 4}
    file = tmp_path / "run.yaml"
    file.write_text(
        to_yaml(fleet.config(str(tmp_path), run_name, train={"steps": 1}, warm_start=warm))
    )
    command = [sys.executable, "-m", "rlearner.cli", "start", str(file), "--broker", broker_url]
    for life in ("first", "second"):
        log = tmp_path / f"{life}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=ENV)
        try:
            while process.poll() is None and "warm start, step 10 " not in log.read_text():
                time.sleep(0.02)
            assert process.poll() is None, log.read_text()
        finally:
            process.kill()
            process.wait()
