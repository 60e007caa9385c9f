"""What an operator sees on a bad evening, command by command: nine things that once misled, each as
a real process on one run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import IO

import learner_fleet as fleet
import pytest
import yaml
from waits import LONG_S, until

from broker.jetstream.bus import Bus
from broker.settings.runspec import newest_epoch
from learner.checkpoints import checkpoint
from learner.prepare import to_yaml
from rlearner_text.config import TinyModel
from rlearner_text.tiny import build_tiny

ENV = {name: value for name, value in os.environ.items() if name not in ("RL_BROKER", "RL_RUN")} | {
    "OMP_NUM_THREADS": "1"
}
OTHER = fleet.TINY | {"hidden_size": 32}


class Command:
    """``rlearner …`` in a process of its own, which writes to files: a pipe that nobody reads would
    stop it.
    """

    def __init__(self, *arguments: str, stdout: int | None = None) -> None:
        self._out, self._err = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115  # closed when they are read
        command = [sys.executable, "-m", "rlearner.cli", *arguments]
        self.process = Popen(
            command, stdout=self._out if stdout is None else stdout, stderr=self._err, env=ENV
        )

    async def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        await until(lambda: self.process.poll() is not None, 2 * LONG_S)
        out, err = (self._read(file) for file in (self._out, self._err))
        assert "Traceback" not in err, err
        return self.process.wait(), out, err

    @staticmethod
    def _read(file: IO[str]) -> str:
        with file:
            file.seek(0)
            return file.read()


async def run(*arguments: str) -> tuple[int, str, str]:
    return await Command(*arguments).ended()


async def test_nothing_misleads(bus: Bus, broker_url: str, run_name: str, tmp_path: Path) -> None:
    settings = fleet.config(
        str(tmp_path),
        run_name,
        train={"steps": 1000},
        checkpoint={"every_steps": 1, "keep": 2},
        samples={"keep": True},
    )
    file, folder = tmp_path / "run.yaml", tmp_path / run_name
    file.write_text(to_yaml(settings))
    start = ("start", str(file), "--broker", broker_url)
    where = (run_name, "--dir", str(tmp_path))
    held = folder / "checkpoints"
    async with fleet.Hub(bus, lambda ticket: [fleet.group(ticket, ticket.min_version)], work_s=0.1):
        first = Command(*start)
        try:
            await until(
                lambda: (
                    len(checkpoint.list_checkpoints(held)) == 2
                    and checkpoint.list_checkpoints(held)[0].name > "step-000001"
                ),
                2 * LONG_S,
            )
            url = (folder / "broker.url").read_bytes()

            # A second `start` does not take over a healthy run, and `up` beside one says where it
            # is and writes nothing.
            code, _, err = await run(*start)
            assert (
                code,
                "is being trained by a learner on" in err,
                "--take-over takes it over" in err,
            ) == (
                2,
                True,
                True,
            )
            code, out, err = await run("up", str(file))
            assert (code, out) == (2, "")
            assert err.startswith(f"error: run {run_name} is live at {broker_url} ")
            assert "rebase" not in err
            assert (folder / "broker.url").read_bytes() == url
            assert (await newest_epoch(bus, run_name), first.process.poll()) == (1, None)
        finally:
            first.process.terminate()
        code, _, _ = await first.ended()
        assert code == 130

        # Other groups per step and no archive any more: the audit judges each record by the
        # settings in force when it came.
        steps = (
            checkpoint.read_checkpoint(checkpoint.list_checkpoints(held)[-1]).step + 4
        )  # the log may hold two steps that count by the old rules
        code, _, err = await run(
            *start, f"train.steps={steps}", "train.groups_per_step=3", "samples.keep=false"
        )
        assert code == 0, err
    code, out, err = await run("audit", *where, "--json")
    report = json.loads(out)
    assert (code, report["problems"], report["lost"], report["ok"]) == (0, [], 0, True), err
    assert report["not_archived"] >= 3

    # A reader that has gone ends a command without a word.
    read, write = os.pipe()
    os.close(read)
    gone = Command("audit", *where, stdout=write)
    os.close(write)
    assert (await gone.ended())[0] == 141

    # A checkpoint that was pruned is not replayed from somewhere else.
    code, out, err = await run("replay", *where, "--from", "1", "--to", str(steps))
    kept = [checkpoint.read_checkpoint(path).step for path in checkpoint.list_checkpoints(held)]
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: --from 1: no checkpoint of step 1 is kept; there are checkpoints of steps {kept[0]}, {kept[1]}; "
    )

    # Another model, or other tasks, under the name of a run.
    other = build_tiny(tmp_path / "other", TinyModel.model_validate(OTHER))
    pond = fleet.config(str(tmp_path), run_name)
    pond["domains"] = {"pond": pond["domains"]["lake"]}
    (tmp_path / "pond.yaml").write_text(to_yaml(pond))
    more = f"train.steps={steps + 4}"
    for arguments, said in (
        (
            (*start, more, "model.tiny.hidden_size=32"),
            "error: model.tiny.hidden_size: 32 is not allowed",
        ),
        (
            ("start", str(tmp_path / "pond.yaml"), "--broker", broker_url, more),
            "error: domains: 'pond' is not allowed",
        ),
    ):
        code, _, err = await run(*arguments)
        assert (code, err.splitlines()[-1].startswith(said)) == (2, True), err
    (folder / "broker.url").unlink()  # else `up` leaves a run alone that has a broker elsewhere
    code, _, err = await run("up", str(file), more, f"model.path={other}")
    assert (
        code,
        err.splitlines()[-1].startswith(
            f"error: model.path: '{other}' is not allowed; its hidden_size is 32"
        ),
    ) == (2, True), err
    assert await newest_epoch(bus, run_name) == 2

    # The pictures that `up` leaves can be had of a run that was started by hand.
    assert await run("draw", *where) == (0, f"{folder / 'reward.png'}\n", "")
    assert (folder / "reward.png").stat().st_size > 10_000


@pytest.mark.parametrize("given", [None, 4])
async def test_eval_tasks_are_lowered_unless_somebody_set_them(
    tmp_path: Path, given: int | None
) -> None:
    """To the held-out tasks that there are: three."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(6))
    )
    rows = {"path": str(tmp_path / "rows.jsonl"), "eval_share": 0.5}
    settings = {
        "run": {"name": "few", "dir": str(tmp_path)},
        "domains": {"few": {"env": "qa", "env_args": rows, "rewards": [{"name": "math_answer"}]}},
        "eval": {"every_steps": 1} | ({} if given is None else {"tasks": given}),
    }
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(settings))
    code, out, err = await run("check", "--all", str(tmp_path / "few.yaml"))
    if given is None:
        assert code == 0, err
        assert yaml.safe_load(out)["eval"]["tasks"] == 3
    else:
        assert (code, err) == (
            2,
            "error: eval.tasks: 4 is not allowed; at most 3, the held-out tasks of domain few\n",
        )
