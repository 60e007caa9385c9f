"""The launch scripts of a plan, run with programs that only note how they were called."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rlearner.plan.candidates import Plan
from rlearner.plan.facts import Machine, Memory, Part
from rlearner.plan.scripts import host_script, launch_lines
from rlearner.plan.serving_memory import ServerLayout
from rlearner.plan.throughput import StepTimes
from rlearner.plan.training_memory import LearnerLayout

NOTHING = Memory((Part("weights", 1, ""),), "")
PLAN = Plan(LearnerLayout("ddp", 2), NOTHING, ServerLayout(), None, 2, 0, None, StepTimes(1.0, 1.0))
TWO = Machine(4, 1.0, 2)
NOTED = """#!/bin/sh
echo "$(basename "$0") $*" >> "$NOTES"
[ "$1" = invited ] && cat "$ACCEPTED"
while [ $# -gt 0 ]; do
    [ "$1" = --out ] && echo '{"role": "rollout", "name": "rollout-new", "expires_at": 1}' > "$2"
    shift
done
exit 0
"""


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("rlearner", "broker", "envhub", "rollout-server", "rewardhub"):
        (folder / name).write_text(NOTED)
        (folder / name).chmod(0o755)
    (tmp_path / "accepted").write_text("rollout-new  rollout of run r, until then\n")
    return folder


def launch(
    programs: Path, host: int, address: str | None = "10.0.0.1", run: str = "r"
) -> tuple[int, str, list[str]]:
    """Run the script of a host; return its exit code, what it says, and the calls."""
    folder = programs.parent
    file, notes = folder / f"host-{host}.sh", folder / "notes"
    notes.unlink(missing_ok=True)
    file.write_text(host_script(PLAN, TWO, host, run, 8))
    env = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "NOTES": str(notes),
        "ACCEPTED": str(folder / "accepted"),
    }
    env |= {"HOST0": address} if address is not None else {}
    ended = subprocess.run(
        ["sh", str(file)], env=env, cwd="/", capture_output=True, text=True, timeout=30, check=False
    )
    return ended.returncode, ended.stderr, notes.read_text().splitlines() if notes.exists() else []


def invitations(calls: list[str]) -> list[str]:
    return [call for call in calls if call.startswith("rlearner invite ")]


def test_a_token_lies_next_to_the_script_and_is_kept_while_the_broker_accepts_it(
    programs: Path,
) -> None:
    token = programs.parent / "r.rollout.token"
    made = (
        f"rlearner invite rollout --run r --expires 24h --out {token} --broker tls://10.0.0.1:4222"
    )
    assert invitations(launch(programs, 0)[2]) == [made]
    assert invitations(launch(programs, 0)[2]) == []
    assert invitations(launch(programs, 0, run="other")[2]) == [
        made.replace("run r", "run other").replace("/r.", "/other.")
    ]
    (programs.parent / "accepted").write_text("rollout-other  rollout of run r, until then\n")
    token.chmod(0o400)
    assert invitations(launch(programs, 0)[2]) == [made]


def test_only_roles_on_other_hosts_get_tokens() -> None:
    def tokens(plan: Plan) -> list[list[str]]:
        return [
            [line for line in launch_lines(plan, TWO, host, 8) if line.startswith("token")]
            for host in (0, 1)
        ]

    assert tokens(PLAN) == [["token rollout"], ["token rollout"]]
    assert tokens(replace(PLAN, rewards=1, servers=1)) == [["token rollout", "token rewardhub"]] * 2
    assert tokens(replace(PLAN, learner=LearnerLayout("ddp", 4), servers=0)) == [[], []]


def test_another_host_waits_for_its_token(programs: Path) -> None:
    code, says, calls = launch(programs, 1)
    assert (code, calls) == (2, [])
    assert says.startswith(f"{programs.parent}/r.rollout.token: no such file; start host-0.sh")
    launch(programs, 0)
    code, says, calls = launch(programs, 1)
    assert (code, says) == (0, "")
    assert calls == [f"rollout-server --gpus 0-1 --join {programs.parent}/r.rollout.token"]


@pytest.mark.parametrize("address", [None, "", "localhost", "127.0.0.1", "::1", "[::1]", "0.0.0.0"])
@pytest.mark.parametrize("host", [0, 1])
def test_an_address_that_other_hosts_cannot_reach_is_refused(
    programs: Path, host: int, address: str | None
) -> None:
    code, says, calls = launch(programs, host, address)
    assert (code, calls, says.count("\n")) == (2, [], 1)
    assert says.startswith(f"HOST0: '{address or ''}' is not allowed; the address by which")
