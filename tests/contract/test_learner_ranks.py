"""A learner of two ranks as a supervisor meets it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import learner_fleet as fleet
import psutil
import pytest

from broker.contract import wire
from broker.jetstream.bus import Bus
from learner.prepare import to_yaml

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("ddp", marks=pytest.mark.timeout(240)),
        pytest.param("deepspeed", marks=pytest.mark.timeout(600)),
        pytest.param("megatron", marks=pytest.mark.timeout(600)),
    ],
)
async def test_a_killed_rank_ends_the_learner_in_one_line_and_it_resumes(
    bus: Bus, broker_url: str, run_name: str, tmp_path: Path, backend: str
) -> None:
    train = {
        "steps": 8,
        "groups_per_step": 2,
        "max_staleness": 1,
        "backend": backend,
        "ranks": 2,
        "device": "cpu",
    }
    if backend == "deepspeed":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed: make test-deepspeed")
        train["deepspeed"] = {"stage": 3, "param_persistence_threshold": 0}
    model = {"path": None, "tiny": fleet.TINY}
    if backend == "megatron":
        pytest.importorskip("megatron.core", reason="megatron is not installed: make test-megatron")
        train["megatron"] = {"tensor_parallel": 2}
        model["tiny"] = {**fleet.TINY, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    file, log = tmp_path / "run.yaml", tmp_path / "learner.log"
    file.write_text(
        to_yaml(
            fleet.config(
                str(tmp_path), run_name, train=train, model=model, checkpoint={"every_steps": 3}
            )
        )
    )
    command = [sys.executable, "-m", "rlearner.cli", "start", str(file), "--broker", broker_url]
    killed: list[int] = []
    process: asyncio.subprocess.Process | None = None

    def answer(ticket: wire.Ticket) -> list[wire.Message | bytes]:
        if ticket.number == 12 and not killed:
            assert process is not None
            while not (tmp_path / run_name / "checkpoints" / "step-000003").exists():
                time.sleep(0.01)
            (rank,) = [
                one
                for one in psutil.Process(process.pid).children()
                if "learner.backends.ranks.follower" in one.cmdline()
            ]
            rank.send_signal(signal.SIGKILL)
            killed.append(rank.pid)
        return [fleet.group(ticket, ticket.min_version)]

    async with fleet.Hub(bus, answer), asyncio.timeout(220 if backend == "ddp" else 580):
        for expected in (1, 0):
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *command, stdout=output, stderr=output, env=ENV
                )
            assert await process.wait() == expected, log.read_text()
    text = log.read_text()
    assert text.count(f"rank 1 (pid {killed[0]}) ended by SIGKILL; so does the learner") == 1
    assert "Traceback" not in text
    assert "resuming from" in text
    lines = [
        json.loads(line)
        for line in (tmp_path / run_name / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["ticket/trained"] == 16
