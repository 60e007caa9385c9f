"""The units of deploy/systemd under a real systemd, as the first process of a machine of its own: a
run that trains.

Every process is killed and frozen once, stopped and started again; at the end the audit finds
nothing lost. The tests share the machine and its run, in this order.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from systemd_machine import Machine

from rlearner.units.services import FOLDER, static_files

TREE = os.environ.get("RL_SYSTEMD_TREE", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not TREE, reason="needs a Debian tree to boot, and root: make test-systemd"),
]

BROKER, LEARNER, SERVER = (
    "rlearner-broker.service",
    "rlearner@lake.service",
    "rollout-server@cpu.service",
)
HUB, REWARDS = "envhub@1.service", "rewardhub@1.service"
OTHERS = [BROKER, SERVER, HUB, REWARDS]
ALL = [*OTHERS, LEARNER]
WATCHDOG_S = 30  # instead of the units' own, so that the tests need not wait for minutes
MOST_EXPOSURE = 4.0
CONFIG = """\
inherit: configs/quickstart.yaml
model:
  tiny: {hidden_size: 32, num_layers: 1, num_heads: 2, num_kv_heads: 2, head_dim: 16, intermediate_size: 64,
         vocab: chars}
domains:
  programs:
    env: qa
    env_args: {path: /etc/rlearner/programs.jsonl, question: prompt, answer: tests, template: "{question}"}
    group_size: 2
    max_turns: 1
    max_context_tokens: 256
    sampling: {temperature: 1.0, max_tokens: 4}
    rewards:
      - {name: code, args: {timeout_s: 8, cpu_s: 4, memory_mib: 512}}
train: {steps: STEPS, groups_per_step: 2}
warm_start: {domain: lake, steps: 2, episodes: 16}
eval: {every_steps: 0}
checkpoint: {every_steps: 5}
envhub: {n: 16}
"""
TASK = {"prompt": "Write a function add(a, b).", "tests": '["assert add(1, 2) == 3"]'}
PROBE = """\
import os
from rlearner_sandbox import Sandbox
ended = Sandbox().run("import os; print(6 * 7, os.path.exists('/var/lib/rlearner'))")
print("sandbox:", ended.stdout.decode().strip())
for place in ("/etc/rlearner/new", "/opt/new", "/usr/new", "/home/new"):
    try:
        open(place, "w").close()
        print("written:", place)
    except OSError:
        pass
print("user:", os.getuid() != 0, "mode: %o" % os.stat(".").st_mode)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    made = Machine(Path(TREE), tmp_path_factory.mktemp("machine"))
    try:
        for name, text in static_files().items():
            if name.endswith((".service", ".target")):
                made.put(f"/etc/systemd/system/{name}", text)
        made.put("/usr/lib/sysusers.d/rlearner.conf", static_files()["rlearner.sysusers"])
        made.put("/etc/rlearner/lake.yaml", CONFIG.replace("STEPS", "100000"))
        made.put("/etc/rlearner/programs.jsonl", (json.dumps(TASK) + "\n") * 40)
        made.put("/etc/rlearner/rlearner.env", "RL_RUN=lake\n")
        for name in ALL:
            made.put(
                f"/run/systemd/system/{name}.d/test.conf", f"[Service]\nWatchdogSec={WATCHDOG_S}\n"
            )
        made.run(
            f"systemd-sysusers && systemctl daemon-reload && systemctl enable rlearner.target {' '.join(ALL)}"
        )
        yield made
        print(f"\n{made.console()}")
    finally:
        made.close()


def step(machine: Machine) -> int:
    """Return the learner's step, as its status says; -1 if it says none."""
    found = re.search(r"step (\d+)", machine.show(LEARNER, "StatusText").get("StatusText", ""))
    return int(found[1]) if found else -1


def trains(machine: Machine, within_s: float = 240.0) -> None:
    """Wait until the learner has trained three more steps than at first."""
    first: list[int] = []

    def reached() -> bool:
        now = step(machine)
        first.extend([now] * (now >= 0 and not first))
        return bool(first) and now >= first[0] + 3

    machine.wait(
        reached,
        within_s,
        f"no steps: {machine.run('systemctl status --no-pager rlearner@lake', check=False)}",
    )


def restarts(machine: Machine, unit: str) -> int:
    return int(machine.show(unit, "NRestarts")["NRestarts"])


def test_systemd_finds_no_fault_and_little_exposure(machine: Machine) -> None:
    names = sorted(name for name in static_files() if name.endswith((".service", ".target")))
    assert machine.run(f"cd /etc/systemd/system && systemd-analyze verify {' '.join(names)}") == ""
    files = " ".join(name for name in names if name.endswith(".service"))
    shown = machine.run(
        f"cd /etc/systemd/system && systemd-analyze security --offline=true --no-pager {files}"
    )
    overall = re.findall(r"Overall exposure level for (\S+): ([\d.]+)", shown)
    found = {unit: float(exposure) for unit, exposure in overall}
    print(f"exposure: {found}")
    assert len(found) == 5
    assert all(exposure <= MOST_EXPOSURE for exposure in found.values()), found


def test_all_but_the_learner_start_and_wait_for_it(machine: Machine) -> None:
    began = time.monotonic()
    machine.run(f"systemctl start {SERVER} {HUB} {REWARDS} --no-block")
    machine.wait(
        lambda: machine.show(HUB, "StatusText")["StatusText"] == "waiting for a broker", 60
    )
    # it does not count as started without one
    assert machine.show(HUB, "ActiveState")["ActiveState"] == "activating"
    machine.run(f"systemctl start {BROKER}")
    for unit in OTHERS:
        machine.wait_state(unit, "active")
    print(f"broker, server and hubs after {time.monotonic() - began:.1f} s")
    assert {machine.show(unit, "StatusText")["StatusText"] for unit in (SERVER, HUB, REWARDS)} == {
        "waiting for run lake"
    }
    assert machine.show(BROKER, "StatusText")["StatusText"] == "broker at nats://127.0.0.1:4222"


def test_the_target_brings_up_the_learner_and_it_trains(machine: Machine) -> None:
    machine.run("systemctl start rlearner.target")
    machine.wait_state(LEARNER, "active")
    trains(machine)
    machine.wait(lambda: "version" in machine.show(SERVER, "StatusText")["StatusText"], 30)
    assert [restarts(machine, unit) for unit in ALL] == [0] * 5


def test_the_journal_has_fields_and_no_second_time(machine: Machine) -> None:
    line = machine.run(f"journalctl -u {HUB} RL_RUN=lake RL_ROLE=envhub -n 1 -o json --no-pager")
    entry = json.loads(line)
    assert entry["_SYSTEMD_UNIT"] == HUB
    assert entry["SYSLOG_IDENTIFIER"] == "envhub"
    assert entry["RL_ID"].startswith("envhub-")
    assert entry["PRIORITY"] == "6"
    assert not re.match(r"\d{4}-", entry["MESSAGE"])


@pytest.mark.parametrize("unit", ALL)
def test_a_killed_process_starts_again_and_the_run_goes_on(machine: Machine, unit: str) -> None:
    before, pid = restarts(machine, unit), machine.show(unit, "MainPID")
    machine.run(f"systemctl kill --signal=KILL --kill-whom=main {unit}")
    began = time.monotonic()
    machine.wait(
        lambda: machine.show(unit, "MainPID") != pid and restarts(machine, unit) > before, 60
    )
    machine.wait_state(unit, "active")
    print(f"{unit}: active {time.monotonic() - began:.1f} s after kill -9")
    trains(machine)
    assert restarts(machine, unit) == before + 1, machine.journal(f"-u {unit} -n 80")


@pytest.mark.parametrize("unit", ALL)
def test_a_frozen_process_is_killed_by_the_watchdog(machine: Machine, unit: str) -> None:
    before = restarts(machine, unit)
    machine.run(f"systemctl kill --signal=STOP --kill-whom=main {unit}")
    began = time.monotonic()
    machine.wait(lambda: restarts(machine, unit) > before, WATCHDOG_S + 60)
    machine.wait_state(unit, "active")
    print(f"{unit}: active {time.monotonic() - began:.1f} s after it froze")
    assert f"{unit}: Watchdog timeout (limit {WATCHDOG_S}s)!" in machine.journal(f"-u {unit}")
    trains(machine)
    assert restarts(machine, unit) == before + 1, machine.journal(f"-u {unit} -n 80")


def test_an_error_of_the_users_is_one_line_and_no_restart(machine: Machine) -> None:
    machine.put("/etc/rlearner/broken.yaml", CONFIG.replace("STEPS", "many"))
    assert "failed" in machine.run("systemctl start rlearner@broken", check=False)
    time.sleep(7)  # beyond RestartSec
    names = ("ActiveState", "NRestarts", "ExecMainStatus", "Result")
    expected = {
        "ActiveState": "failed",
        "NRestarts": "0",
        "ExecMainStatus": "2",
        "Result": "exit-code",
    }
    assert machine.show("rlearner@broken", *names) == expected
    errors = machine.journal("-u rlearner@broken -p err _TRANSPORT=stdout").splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: train.steps: 'many' is not allowed")
    assert machine.show("rlearner@broken", "StatusText")["StatusText"].endswith(
        errors[0].removeprefix("error: ")
    )


def test_a_second_learner_is_told_whose_run_it_is(machine: Machine) -> None:
    command = "rlearner start /etc/rlearner/lake.yaml run.name=lake"
    machine.put(
        "/run/systemd/system/rlearner@second.service.d/test.conf",
        f"[Service]\nExecStart=\nExecStart=/opt/rlearner/bin/{command}\n",
    )
    machine.run("systemctl daemon-reload; systemctl start rlearner@second", check=False)
    machine.wait_state("rlearner@second", "failed")
    (error,) = machine.journal("-u rlearner@second -p err _TRANSPORT=stdout").splitlines()
    pid = machine.show(LEARNER, "MainPID")["MainPID"]
    assert error.startswith("error: run lake is being trained by a learner on ")
    assert f", process {pid}; --take-over takes it over" in error
    assert machine.show("rlearner@second", "NRestarts")["NRestarts"] == "0"
    trains(machine)


def test_a_unit_without_its_token_says_which_file_and_with_it_joins(machine: Machine) -> None:
    unit = "envhub@joined.service"
    machine.put(f"/etc/systemd/system/{unit}.d/join.conf", static_files()["join.conf"])
    said = machine.run(f"systemctl daemon-reload; systemctl start {unit}", check=False)
    assert f"Assertion failed on job for {unit}." in said
    line = f"Assertion failed for {unit} - rlearner envhub joined, which joins with /etc/rlearner/envhub.token."
    assert machine.journal(f"-u {unit}").splitlines()[-1] == line
    assert machine.show(unit, "ActiveState", "NRestarts") == {
        "ActiveState": "inactive",
        "NRestarts": "0",
    }

    operator = "runuser -u rlearner -- env -C /var/lib/rlearner HOME=/var/lib/rlearner /opt/rlearner/bin/rlearner"
    machine.run(
        f"{operator} invite envhub --run lake --name joined --out /var/lib/rlearner/envhub.token"
    )
    machine.run(
        "install -o root -g root -m 600 /var/lib/rlearner/envhub.token /etc/rlearner/envhub.token"
    )
    machine.run(f"systemctl start {unit}")
    machine.wait(lambda: "lake" in machine.show(unit, "StatusText")["StatusText"], 60)
    pid = machine.show(unit, "MainPID")["MainPID"]
    words = machine.run(f"tr '\\0' ' ' < /proc/{pid}/cmdline").split()
    assert words[-2:] == ["--join", f"/run/credentials/{unit}/token"]

    machine.run(f"{operator} revoke joined")
    machine.wait_state(unit, "failed")
    time.sleep(7)
    assert machine.show(unit, "NRestarts", "ExecMainStatus") == {
        "NRestarts": "0",
        "ExecMainStatus": "2",
    }
    assert "revoked or has expired" in machine.journal(f"-u {unit} -p err _TRANSPORT=stdout")


@pytest.mark.parametrize("template", ["rlearner", "envhub", "rewardhub"])
def test_sandboxed_programs_run_inside_and_little_else_does(
    machine: Machine, template: str
) -> None:
    unit = f"{template}@probe.service"
    machine.put("/opt/probe.py", PROBE)
    once = "[Service]\nType=oneshot\nWatchdogSec=0\nRestart=no\nExecStart=\n"
    command = "ExecStart=/opt/rlearner/bin/python /opt/probe.py\n"
    machine.put(f"/run/systemd/system/{unit}.d/probe.conf", once + command)
    machine.run(f"systemctl daemon-reload && systemctl start {unit}", check=False)
    said = machine.journal(f"-u {unit} _TRANSPORT=stdout").splitlines()
    assert said == ["sandbox: 42 False", "user: True mode: 40700"]


def test_a_stop_drains_everything_within_its_time(machine: Machine) -> None:
    trains(machine)
    began = time.monotonic()
    machine.run(f"systemctl stop rlearner.target {' '.join(ALL)}", timeout_s=300)
    print(f"the whole target stopped in {time.monotonic() - began:.1f} s")
    for unit in ALL:
        shown = machine.show(unit, "ActiveState", "Result", "ExecMainStatus")
        code = "130" if unit == LEARNER else "0"
        assert shown == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": code}, (
            unit
        )
    last = machine.journal(f"-u {LEARNER} RL_ROLE=learner").splitlines()
    assert any("stopping: SIGTERM" in line for line in last[-20:])
    steps = [int(found[1]) for line in last if (found := re.match(r"step (\d+) of", line))]
    checkpoints = machine.run("ls /var/lib/rlearner/runs/lake/checkpoints").split()
    assert f"step-{steps[-1]:06}" in checkpoints  # it wrote a last one


def test_a_broker_whose_port_is_taken_says_so_and_stays_down(machine: Machine) -> None:
    machine.run("systemd-run --unit=other python3 -m http.server 4222 --bind 127.0.0.1")
    time.sleep(1)
    machine.run(f"systemctl start {BROKER}", check=False)
    time.sleep(7)
    assert machine.show(BROKER, "ActiveState", "ExecMainStatus")["ActiveState"] == "failed"
    error = machine.journal(f"-u {BROKER} -p err _TRANSPORT=stdout").splitlines()[-1]
    taken = "port 4222 on 127.0.0.1 is already in use, perhaps by another broker; choose another with --port"
    assert error == f"error: {taken}"
    machine.run(f"systemctl stop other; systemctl reset-failed {BROKER}")


def test_the_target_starts_again_ends_with_its_run_and_nothing_is_lost(machine: Machine) -> None:
    done = int(
        re.findall(r"step-(\d+)", machine.run("ls /var/lib/rlearner/runs/lake/checkpoints"))[-1]
    )
    machine.put("/etc/rlearner/lake.yaml", CONFIG.replace("STEPS", str(done + 6)))
    machine.run("systemctl start rlearner.target")
    for unit in (LEARNER, SERVER, HUB, REWARDS):
        machine.wait_state(unit, "inactive", 180)
        assert machine.show(unit, "Result", "ExecMainStatus") == {
            "Result": "success",
            "ExecMainStatus": "0",
        }
    operator = "runuser -u rlearner -- env -C /var/lib/rlearner HOME=/var/lib/rlearner /opt/rlearner/bin/rlearner"
    audit = machine.run(f"{operator} audit lake")
    print(audit)
    counts = {
        name: int(number) for name, number in re.findall(r"^  (\w+) +(\d+)$", audit, re.MULTILINE)
    }
    ends = ("trained", "filtered", "dropped", "dead", "open")
    assert counts["tickets"] == sum(counts[name] for name in ends)
    assert counts["open"] == counts["dead"] == counts["lost"] == counts["trained_twice"] == 0
    assert audit.splitlines()[-1] == "ok"  # each record in the log once, and each step of it


def test_the_folder_is_what_was_tested() -> None:
    assert {
        file.name: file.read_text() for file in (Path(__file__).parents[2] / FOLDER).iterdir()
    } == static_files()
