"""Programs of users on the streams: the code of docs/streams.md, and the example that learns
CartPole.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import pytest

from broker.contract import codec, wire
from broker.contract.streams import LOG, WORK_QUEUE, Stream
from broker.errors import ConfigError, TooLarge, WireError
from broker.jetstream.bus import Bus
from examples.cartpole import actors, dqn
from examples.cartpole.streams import ASSIGNMENTS, EPISODES, QUEUE, Assignment, Played

ROOT: Final = Path(__file__).parents[2]
ENV: Final = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PROGRAM: Final = re.search(
    r"```python\n(.*?)```", (ROOT / "docs" / "streams.md").read_text(), re.DOTALL
)


class Reading(wire.Message, frozen=True):
    sensor: str
    value: float
    samples: wire.Column | None = None
    nested: dict[str, list[float]] = {}  # noqa: RUF012 - msgspec copies it


class Small(wire.Message, frozen=True):
    text: str


@contextmanager
def running(*command: str, cwd: Path = ROOT, **env: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env=ENV | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_page_s_program_factors_numbers_though_a_worker_dies(
    tmp_path: Path, broker_url: str
) -> None:
    assert PROGRAM is not None
    (tmp_path / "factor.py").write_text(PROGRAM[1])
    with (
        running("factor.py", broker_url, cwd=tmp_path) as killed,
        running("factor.py", broker_url, cwd=tmp_path),
        running("factor.py", broker_url, "91", "97", "15", "4", cwd=tmp_path) as collector,
    ):
        killed.send_signal(signal.SIGKILL)
        printed, errors = collector.communicate(timeout=60)
    assert printed.splitlines() == ["91 7", "97 97", "15 3", "4 2"], errors


def test_learner_and_actors_go_on_when_an_actor_is_killed() -> None:
    with running(
        "-m", "examples.cartpole.actors", "--actors", "2", "--solved", "100", "--max-steps", "6000"
    ) as run:
        assert run.stdout is not None
        lines: list[str] = []
        for line in run.stdout:
            lines.append(line)
            if found := re.match(r"actor-0 has pid (\d+)", line):
                victim = int(found[1])
            if line.startswith("episode 21 ") and victim:
                os.kill(victim, signal.SIGKILL)
                victim = 0
        assert run.stderr is not None
        assert run.wait(60) == 0, run.stderr.read()
    figures = json.loads(lines[-1])
    assert victim == 0
    assert figures["mean_return"] >= 100
    assert 2000 <= figures["steps"] <= 6500
    by_actor = figures["episodes_by_actor"]
    assert figures["episodes"] == sum(by_actor.values())
    assert [line for line in lines if line.startswith("episode ")][-1].endswith(" by actor-1\n")
    assert 0 <= figures["largest_lag"] <= figures["versions"]


@pytest.mark.parametrize(
    ("victim", "number", "code", "says"),
    [
        ("learner", signal.SIGTERM, 130, "INFO - learner - stopping: SIGTERM\n"),
        (
            "nats-server",
            signal.SIGKILL,
            1,
            "error: the private broker ended by itself, and so does the run\n",
        ),
    ],
)
def test_a_run_that_is_stopped_leaves_nothing(
    victim: str, number: signal.Signals, code: int, says: str, tmp_path: Path
) -> None:
    with running(
        "-m", "examples.cartpole.actors", "--actors", "1", "--solved", "501", TMPDIR=str(tmp_path)
    ) as run:
        assert run.stdout is not None
        while not run.stdout.readline().startswith("episode 1 "):
            assert run.poll() is None
        assert len(list(tmp_path.glob("cartpole-*"))) == 1
        children = psutil.Process(run.pid).children()
        by_name = {"learner": run.pid, **{child.name(): child.pid for child in children}}
        os.kill(by_name[victim], number)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == code
    assert errors.endswith(says)
    assert errors.count("\n") - errors.count("; trying again\n") == 1
    assert errors.count("; trying again\n") <= 1  # the learner may look for the broker once
    assert list(tmp_path.glob("cartpole-*")) == []
    assert [child for child in children if child.is_running()] == []


TRAINING: Final = [
    (["--seed", "-1"], "argument --seed: '-1' is not allowed; a whole number of at least 0"),
    (
        ["--seed", "4294967296"],
        "argument --seed: '4294967296' is not allowed; a whole number from 0 to 4294967295",
    ),
    (["--solved", "nan"], "argument --solved: 'nan' is not allowed; a number above 0"),
    (
        ["--max-steps", "0"],
        "argument --max-steps: '0' is not allowed; a whole number of at least 1",
    ),
    (
        ["--max-steps", "-5"],
        "argument --max-steps: '-5' is not allowed; a whole number of at least 1",
    ),
]
ADDRESS: Final = (
    "is not a broker address; expected nats://host:port, or several separated by commas"
)
DISTRIBUTED: Final = [
    (["--actors", "0"], "argument --actors: '0' is not allowed; a whole number of at least 1"),
    (["--actors", "-1"], "argument --actors: '-1' is not allowed; a whole number of at least 1"),
    (["--join", ""], f"argument --join: '' {ADDRESS}"),
    (["--join", "user:secret@foo"], f"argument --join: 'foo' {ADDRESS}"),
]


@pytest.mark.parametrize(
    ("program", "options", "says"),
    [*(("dqn", *one) for one in TRAINING), *(("actors", *one) for one in TRAINING + DISTRIBUTED)],
)
def test_bad_options_of_the_example(
    program: str, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        {"dqn": dqn, "actors": actors}[program].main(options)
    name = f"python -m examples.cartpole.{program}"
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {name}: {says}; see {name} --help\n"


async def test_messages_of_other_programs_are_checked_on_both_sides(bus: Bus) -> None:
    await bus.ensure_streams((ASSIGNMENTS, EPISODES))
    try:
        assert await bus.publish(ASSIGNMENTS, Assignment(seed=7, epsilon=0.5), key=QUEUE) == 1
        with pytest.raises(WireError, match=r"Assignment\.epsilon: nan; must be finite"):
            await bus.publish(ASSIGNMENTS, Assignment(seed=7, epsilon=float("nan")), key=QUEUE)
        queue = await bus.work_queue(ASSIGNMENTS, QUEUE)
        (delivery,) = await queue.fetch(1, 10.0)
        assert (delivery.message, delivery.seq) == (Assignment(seed=7, epsilon=0.5), 1)
        await delivery.ack()
        subject = EPISODES.subject(bus.run)  # what a program without these checks may send
        await bus.link.send(subject, b"\x82\xa4type\xa6Played\xaaassignment\x01")
        async for record in bus.read_log(EPISODES, 1):
            assert record.message is None
            assert "missing required field" in record.error
            break
    finally:
        await bus.delete_streams((ASSIGNMENTS, EPISODES))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Reading(sensor="a", value=float("inf")), r"Reading\.value: inf; must be finite"),
        (
            Reading(sensor="a", value=0.0, nested={"x": [1.0, float("nan")]}),
            r"Reading\.nested: nan; must be finite",
        ),
        (
            Reading(sensor="a", value=0.0, samples=wire.column([1.0, np.nan], "<f4")),
            r"Reading\.samples: holds NaN or infinity; must be finite",
        ),
        (
            Reading(sensor="a", value=0.0, samples=wire.Column("<i4", b"12345")),
            r"Reading\.samples: 5 bytes; must be a multiple of 4 for dtype <i4",
        ),
    ],
)
def test_numbers_that_are_not_finite_are_refused(message: Reading, why: str) -> None:
    with pytest.raises(WireError, match=why):
        codec.encode(message)


def test_only_messages_with_bytes_may_be_large() -> None:
    large = Reading(sensor="a", value=0.0, samples=wire.column(np.zeros(1_000_000), "<f4"))
    assert codec.decode(codec.encode(large), Reading) == large
    with pytest.raises(TooLarge, match="Small is 200022 bytes, the limit is 196608"):
        codec.encode(Small(text="x" * 200_000))
    with pytest.raises(TooLarge, match="the limit is 8388608"):
        codec.encode(
            Reading(sensor="a", value=0.0, samples=wire.column(np.zeros(2_200_000), "<f4"))
        )


def test_a_user_s_rule_holds_for_what_is_received() -> None:
    short = {"observations": wire.column([0.0] * 8, "<f4"), "actions": wire.column([1, 0], "|u1")}
    with pytest.raises(ValueError, match="observations must be one more than actions"):
        Played(assignment=1, actor="a", version=0, terminated=True, **short)
    right = Played(assignment=1, actor="a", version=0, terminated=True, observations=wire.column([0.0] * 12, "<f4"),
                   actions=short["actions"])  # fmt: skip
    for column, dtype in (("observations", "<i4"), ("actions", "<f4")):
        wrong = {"observations": right.observations, "actions": right.actions}
        wrong[column] = wire.Column(dtype, wrong[column].data)
        with pytest.raises(
            ValueError, match=r"observations and actions must be <f4 and \|u1, not .*" + dtype
        ):
            Played(assignment=1, actor="a", version=0, terminated=True, **wrong)
    data = codec.encode(right)
    assert codec.decode(data, Played) == right
    with pytest.raises(WireError, match="observations must be one more than actions"):
        codec.decode(data.replace(b"\xc4\x02\x01\x00", b"\xc4\x01\x01"), Played)


async def test_a_stream_does_not_take_the_name_of_another(bus: Bus) -> None:
    with pytest.raises(ConfigError, match="tickets"):
        await bus.ensure_streams((Stream("tickets", LOG, (Small,)),))
    with pytest.raises(ConfigError, match="mine"):
        await bus.ensure_streams(
            (Stream("mine", LOG, (Small,)), Stream("mine", WORK_QUEUE, (Small,), key="k"))
        )
    with pytest.raises(ConfigError, match="two words"):
        Stream("two words", LOG, (Small,))
