"""One server for each share of the GPUs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.errors import UserError
from broker.runtime.process import Stop
from rollout import replicas
from rollout.cli import parser
from rollout.config import RolloutSection


def section(size: int = 2, engine: str = "vllm", **more: object) -> RolloutSection:
    return RolloutSection(engine=engine, engine_args={"tensor_parallel": size}, **more)  # type: ignore[arg-type]


def test_shares() -> None:
    assert replicas.gpu_shares("4-7", section()) == [[4, 5], [6, 7]]
    assert replicas.gpu_shares("0,2,4,6", section(4)) == [[0, 2, 4, 6]]
    assert replicas.gpu_shares("3,1", section(1)) == [[3], [1]]
    assert replicas.gpu_shares("auto", section()) == replicas.gpu_shares("cpu", section()) == [[]]
    assert replicas.gpu_shares("0-3", RolloutSection(engine="hf")) == [[]]
    assert replicas.gpu_shares("0-3", section(engine="sglang")) == [[]]  # divides them itself
    with pytest.raises(
        UserError,
        match=r"--gpus 4-6 names 3 GPUs, which rollout.engine_args.tensor_parallel=2 does not divide",
    ):
        replicas.gpu_shares("4-6", section())


def test_each_is_started_as_the_whole_with_its_own_gpus_name_and_port() -> None:
    options = parser().parse_args(
        [
            "--broker",
            "nats://h:1",
            "--gpus",
            "4-7",
            "--id",
            "s",
            "--engine",
            "vllm",
            "--snapshot",
            "/s",
            "max_running=8",
            "http_port=9000",
        ]
    )
    command = replicas.replica_command(options, "r", section(http_port=9000))
    given = parser().parse_args(command(1, [6, 7])[3:])
    assert (given.gpus, given.id, given.engine, given.run, given.broker) == (
        "6,7",
        "s-1",
        "vllm",
        "r",
        "nats://h:1",
    )
    assert given.snapshot == "/s"
    assert (given.http, given.overrides) == (9001, ["max_running=8"])
    options = parser().parse_args(["--http=0", "--gpus", "4-7"])
    assert (
        parser()
        .parse_args(replicas.replica_command(options, "r", section(http_port=0))(1, [6, 7])[3:])
        .http
        == 0
    )


def child(folder: Path, body: str) -> replicas.Command:
    """Servers that note their GPUs, then do as told."""

    def command(index: int, numbers: Sequence[int]) -> list[str]:
        note = (
            f"import pathlib, sys, time, signal; p = pathlib.Path({str(folder)!r}) / '{index}'; n = "
            f"len(list(p.parent.glob('{index}*')))"
        )
        return [
            sys.executable,
            "-c",
            f"{note}; p.with_name(f'{index}-{{n}}').write_text('{list(numbers)}'); {body}",
        ]

    return command


def notes(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


async def test_one_that_dies_is_started_again_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "FIRST_RESTART_S", 0.05)
    body = "time.sleep(0.3) if p.name == '0' else None; sys.exit(0 if n or p.name == '0' else 7)"
    await replicas.run([[4, 5], [6, 7]], child(tmp_path, body), Stop(), drain_s=1)
    assert notes(tmp_path) == {"0-0": "[4, 5]", "1-0": "[6, 7]", "1-1": "[6, 7]"}


async def test_bad_input_of_one_ends_all(tmp_path: Path) -> None:
    began = time.monotonic()
    body = "time.sleep(0.2); sys.exit(2) if p.name == '1' else time.sleep(60)"
    with pytest.raises(UserError, match="the server on GPUs 6,7 could not start"):
        await replicas.run([[4, 5], [6, 7]], child(tmp_path, body), Stop(), drain_s=1)
    assert time.monotonic() - began < 30


async def test_a_stop_drains_them(tmp_path: Path) -> None:
    stop = Stop()
    body = "signal.signal(15, lambda *_: (p.with_name('drained' + p.name).write_text(''), sys.exit(0))); time.sleep(60)"
    running = asyncio.create_task(replicas.run([[4], [5]], child(tmp_path, body), stop, drain_s=5))
    async with asyncio.timeout(30):
        while len(notes(tmp_path)) < 2:  # noqa: ASYNC110 - processes of their own
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    stop.request("test")
    await asyncio.wait_for(running, 30)
    assert notes(tmp_path).keys() == {"0-0", "1-0", "drained0", "drained1"}
