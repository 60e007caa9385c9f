"""An identity outlives its process, and says when that has ended."""

from __future__ import annotations

import subprocess
import sys

from waits import runs

from broker.system.process_identity import has_ended, this_process

CHILD = (
    "import sys; from broker.system.process_identity import this_process; print(this_process(), flush=True); "
    "sys.stdin.read()"
)


def test_a_process_has_ended_once_it_is_killed_and_before_its_parent_has_noticed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        identity = child.stdout.readline().strip()
        assert identity.split("/")[-2] == str(child.pid)
        assert not has_ended(identity)
        child.kill()
        while runs(child.pid):
            pass
        assert has_ended(identity)  # a zombie
        child.wait()
        assert has_ended(identity)


def test_another_process_under_the_same_number_is_not_the_same() -> None:
    machine, pid, started = this_process().rsplit("/", 2)
    assert not has_ended(this_process())
    assert has_ended(f"{machine}/{pid}/{int(started) + 1}")


def test_a_process_that_cannot_be_seen_from_here_may_live() -> None:
    boot, namespace, _, _ = this_process().rsplit("/", 3)
    for identity in (
        "",
        "nonsense",
        f"other/{namespace}/999999999/1",
        f"{boot}/pid:[1]/999999999/1",
        f"{boot}/{namespace}/x/1",
    ):
        assert not has_ended(identity), identity
    assert has_ended(f"{boot}/{namespace}/999999999/1")
