"""``python -m bench.gpu``: order, limits, resuming, failing steps, its last line and the table;
with made-up steps.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu import __main__ as command
from bench.gpu.common import MODELS
from bench.gpu.quickstart import commands, successes
from bench.gpu.runner import run_steps
from bench.gpu.state import Outcome, State, read_state
from bench.gpu.steps import STEPS, Machine, Step, chosen, why_left_out
from bench.gpu.table import BEGIN, END, last_line, replace_table, table
from broker.errors import UserError
from rlearner.doctor.hardware import GpuInfo, TorchBuild

ONE = Machine("cuda", ("NVIDIA H100",))
TWO = Machine("cuda", ("NVIDIA H100", "NVIDIA H100"))

SCRIPT = """
import json, os, sys, time
name, *words = sys.argv[1:]
with open(os.environ["RAN"], "a") as file:
    file.write(name + "\\n")
if name == "slow":
    time.sleep(60)
if name == "broken":
    sys.exit("it is broken")
if name == "driver":
    print(json.dumps({"devices": ["cpu", "cpu"]}))
else:
    print("so far, so good")
    print(json.dumps({"speed": 1234.5, "failed": ["is_exact"] if name == "unchecked" else []}))
sys.exit(name == "unchecked")
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the names of the steps that started; the module ``gpu_step`` can be imported by
    them.
    """
    (tmp_path / "gpu_step.py").write_text(SCRIPT)
    path = tmp_path / "ran"
    path.write_text("")
    monkeypatch.setenv("RAN", str(path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def step(name: str, least_s: float = 1, limit_s: float = 30, **more: Any) -> Step:
    return Step(
        name,
        f"shows {name}",
        "gpu_step",
        (name,),
        least_s,
        limit_s,
        ("speed",),
        cpu=(name,),
        **more,
    )


def started(ran: Path) -> list[str]:
    return ran.read_text().split()


def test_the_order_begins_with_what_everything_else_needs() -> None:
    names = [step.name for step in STEPS]
    assert names[:3] == ["driver", "weights", "ipc"]
    assert (
        names.index("learner")
        < names.index("engine-hf")
        < names.index("quickstart")
        < names.index("shared")
    )
    assert [step.name for step in STEPS if step.gpus == 2] == ["launch"]
    assert all(step.least_s < step.limit_s for step in STEPS)


def test_all_steps_of_one_gpu_without_vllm_have_time_in_eight_minutes() -> None:
    alone = [
        step
        for step in STEPS
        if step.gpus == 1 and not step.packages and step.name not in ("run", "real", "families")
    ]
    assert sum(step.least_s for step in alone) <= 8 * 60


def test_every_step_takes_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The scripts get as far as looking for a GPU, which is not here."""
    for one in STEPS:
        if why_left_out(one, TWO, 1e6) or one.module == "bench.shared":
            continue
        script = __import__(one.module, fromlist=["main"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bench.gpu.common.existing", list)
            assert script.main(list(one.options)) == 2, one.name
        assert "has no NVIDIA GPU" in capsys.readouterr().err


def test_reasons_to_leave_a_step_out() -> None:
    def installed(name: str) -> bool:
        return name in ("gpu_step", "there")

    assert why_left_out(step("a", packages=("there",)), ONE, 60, installed) == ""
    assert (
        why_left_out(step("a", packages=("vllm",)), ONE, 60, installed) == "vllm is not installed"
    )
    assert why_left_out(step("a", gpus=2), ONE, 60, installed) == "it needs 2 GPUs, and there is 1"
    assert why_left_out(step("a", gpus=2), TWO, 60, installed) == ""
    assert why_left_out(step("a", 61), ONE, 60, installed).startswith(
        "it takes 61 s, and 60 s are left"
    )
    assert (
        why_left_out(step("a", files=("/no/such.gguf",)), ONE, 60, installed)
        == "there is no /no/such.gguf"
    )
    assert why_left_out(step("a", files=(__file__,)), ONE, 60, installed) == ""
    assert why_left_out(step("a"), ONE, 60, lambda _: False) == "gpu_step is not in this version"


def test_steps_by_name() -> None:
    assert [one.name for one in chosen(["engine", "ipc"])] == ["ipc", "engine-hf", "engine-vllm"]
    with pytest.raises(ValueError, match="--only wheels: no such step; there are driver, "):
        chosen(["wheels"])


def test_a_failing_step_does_not_stop_the_rest(ran: Path, tmp_path: Path) -> None:
    state, out = State(), tmp_path / "out.json"
    steps = [
        step("first"),
        step("broken"),
        step("unchecked"),
        step("slow", limit_s=1),
        step("last"),
    ]
    steps.append(step("late", 1000, 1001))
    run_steps(steps, ONE, state, out, total_s=200, say=lambda _: None)
    assert started(ran) == ["first", "broken", "unchecked", "slow", "last"]
    assert {name: one.state for name, one in state.steps.items()} == {
        "first": "passed", "broken": "failed", "unchecked": "failed", "slow": "timed out", "last": "passed",
        "late": "left out",
    }  # fmt: skip
    assert state.steps["broken"].reason == "exit code 1: it is broken"
    assert state.steps["unchecked"].reason == "failed checks: is_exact"
    assert state.steps["slow"].reason == "it did not end within 1 s"
    assert 1 <= state.steps["slow"].seconds < 10
    assert state.steps["last"].result == {"speed": 1234.5, "failed": []}
    assert read_state(out).steps == state.steps
    assert (tmp_path / "out-first.log").read_text().startswith("so far, so good")


def test_what_ran_is_not_repeated_unless_asked(ran: Path, tmp_path: Path) -> None:
    out, steps = tmp_path / "out.json", [step("first"), step("broken"), step("late", 100, 101)]
    run_steps(steps, ONE, State(), out, total_s=90, say=lambda _: None)
    run_steps(steps, ONE, read_state(out), out, total_s=300, say=lambda _: None)
    assert started(ran) == ["first", "broken", "late"]  # what was left out runs once there is time
    run_steps(steps[:1], ONE, read_state(out), out, total_s=300, again=True, say=lambda _: None)
    assert started(ran)[3:] == ["first"]


def test_time_of_earlier_calls_counts(ran: Path, tmp_path: Path) -> None:
    state = State(steps={"before": Outcome("passed", 80.0)})
    run_steps(
        [step("first", 30)], ONE, state, tmp_path / "out.json", total_s=100, say=lambda _: None
    )
    assert state.steps["first"].state == "left out"
    assert started(ran) == []


def test_it_goes_on_after_it_was_killed(ran: Path, tmp_path: Path) -> None:
    """The step that was running ends with the runner, and is repeated."""
    out = tmp_path / "out.json"
    text = (
        "import pathlib, sys; from bench.gpu.runner import run_steps; from bench.gpu.state import read_state\n"
        "from bench.gpu.steps import Machine, Step\n"
        "make = lambda name: Step(name, name, 'gpu_step', (name,), 1, 60, ('speed',))\n"
        f"out = pathlib.Path({str(out)!r})\n"
        "run_steps([make('first'), make(sys.argv[1]), make('last')], Machine('cuda', ('x',)), read_state(out), out,"
        " total_s=600)\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", text, "slow"], stdout=subprocess.PIPE)
    try:
        _wait(lambda: started(ran) == ["first", "slow"])
        (child,) = psutil.Process(runner.pid).children()
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.communicate()
    _wait(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    state = read_state(out)
    assert list(state.steps) == ["first"]
    steps = [step("first"), step("second"), step("last")]
    run_steps(steps, ONE, state, out, total_s=600, say=lambda _: None)
    assert started(ran) == ["first", "slow", "second", "last"]


def _wait(condition: Any, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_command_writes_its_line_and_the_table(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{BEGIN}\n\nold\n\n{END}\nafter\n")
    steps = [step("driver"), step("fast"), step("broken")]
    words = ["--cpu", "--out", str(tmp_path / "out.json"), "--docs", str(page)]
    assert command.main(words, steps) == 1
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (line["device"], line["passed"], line["failed"]) == (
        "2 x cpu",
        ["driver", "fast"],
        ["broken"],
    )
    assert line["figures"]["fast"] == {"speed": 1234.5}
    assert MODELS not in os.environ  # only the steps share models
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n\n2 x cpu, 20")
    assert text.endswith(f"\n\n{END}\nafter\n")
    assert "| fast | passed" in text
    assert "| speed 1,234 |" in text or "| speed 1,235 |" in text
    assert "| broken | failed: exit code 1: it is broken |  |" in text
    # the failure of before is still there
    assert command.main([*words, "--only", "fast"], steps) == 1
    assert started(ran) == ["driver", "fast", "broken", "driver"]


def test_outcomes_of_other_devices_are_not_mixed(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"device": "1 x NVIDIA H100", "steps": {}}))
    assert command.main(["--cpu", "--out", str(out)], [step("driver")]) == 2
    assert "holds outcomes of 1 x NVIDIA H100, not of 2 x cpu" in capsys.readouterr().err
    out.write_text("[]")
    assert command.main(["--cpu", "--out", str(out)], [step("driver")]) == 2
    assert "not a file of bench.gpu" in capsys.readouterr().err


GPU = GpuInfo(0, "NVIDIA H100", 81559, 0, "580.159.04", "9.0")
CUDA = TorchBuild("2.11.0+cu130", "13.0")


@pytest.mark.parametrize(
    ("gpus", "problem", "torch", "error"),
    [
        ([], "", CUDA, "this machine has no NVIDIA GPU, or no driver for it; --cpu runs the steps small without one"),
        ([], "NVML: no driver", CUDA, "the driver does not answer: NVML: no driver"),
        ([GPU], "", TorchBuild("2.13.0+cpu", ""), "torch 2.13.0+cpu is built without CUDA; install its CUDA build"),
        ([replace(GPU, driver="570.86.10")], "", CUDA,
         "driver 570.86.10 is too old: torch 2.11.0+cu130 for CUDA 13.0 needs 580.65 or newer"),
        ([GPU, replace(GPU, index=1, used_mib=20_000)], "", CUDA,
         "GPU 1 is in use by other processes (20000 of 81559 MiB); stop them, or measure anyway with --busy"),
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_measured_gets_one_line(
    gpus: list[GpuInfo], problem: str, torch: TorchBuild, error: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "find_gpus", lambda: (gpus, problem))
    monkeypatch.setattr(command, "find_torch", lambda: torch)
    assert command.main([]) == 2
    assert capsys.readouterr() == ("", f"error: {error}\n")


def test_a_busy_gpu_is_measured_if_asked(
    ran: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_gpus", lambda: ([replace(GPU, used_mib=20_000)], ""))
    monkeypatch.setattr(command, "find_torch", lambda: CUDA)
    words = ["--busy", "--out", str(tmp_path / "out.json"), "--docs", str(tmp_path / "none.md")]
    assert command.main(words, [step("driver")]) == 2  # the page is missing; the step ran
    assert started(ran) == ["driver"]


def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cpu", "--out", "/no/such/out.json"]) == 2
    assert (
        capsys.readouterr().err == "error: --out /no/such/out.json: there is no folder /no/such\n"
    )


def test_figures_of_a_step_that_was_ended_are_kept(ran: Path, tmp_path: Path) -> None:
    (tmp_path / "gpu_partial.py").write_text(
        "import json, time\nprint(json.dumps({'speed': 7.0}), flush=True)\nprint('more', flush=True)\ntime.sleep(60)\n"
    )
    partial_step = Step("partial", "", "gpu_partial", (), 1, 2, ("speed",))
    state = State()
    run_steps([partial_step], ONE, state, tmp_path / "out.json", total_s=100, say=lambda _: None)
    assert (state.steps["partial"].state, state.steps["partial"].result) == (
        "timed out",
        {"speed": 7.0},
    )


def test_a_step_gets_the_time_that_is_left(ran: Path, tmp_path: Path) -> None:
    state = State(steps={"earlier": Outcome("passed", 80.0)})
    began = time.monotonic()
    run_steps(
        [step("slow", 2, 90)], ONE, state, tmp_path / "out.json", total_s=92, say=lambda _: None
    )
    assert state.steps["slow"].reason == "it did not end within 2 s"
    assert time.monotonic() - began < 30


def test_the_page_has_the_markers_and_every_step() -> None:
    text = command.PAGE.read_text()
    assert replace_table(text, "| new |").count("| new |") == 1
    assert [one.name for one in STEPS if f"`{one.name}`" not in text] == []
    with pytest.raises(UserError, match="no markers for the table"):
        replace_table("a page", "| new |")


def test_cells_of_the_table() -> None:
    state = State(
        "1 x A",
        {
            "a": Outcome("passed", 61.4, result={"speed": 0.123456}),
            "b": Outcome("failed", 3, "x | y"),
        },
    )
    mixed = State(
        "1 x A",
        {"a": Outcome("passed", 2, commit="0" * 40), "b": Outcome("passed", 2, commit="1" * 40)},
    )
    assert table([step("a"), step("b")], mixed, "2026-01-02", "1" * 40).splitlines() == [
        "1 x A, 2026-01-02, commit 11111111:", "", "| step | outcome | figures |", "|---|---|---|",
        "| a | passed, 2 s, commit 00000000 |  |", "| b | passed, 2 s |  |",
    ]  # fmt: skip
    assert table([step("a"), step("b"), step("c")], state, "2026-01-02").splitlines() == [
        "1 x A, 2026-01-02:", "", "| step | outcome | figures |", "|---|---|---|",
        "| a | passed, 61 s | speed 0.1235 |", "| b | failed: x \\| y |  |", "| c | not run |  |",
    ]  # fmt: skip
    assert json.loads(last_line([step("a"), step("b")], state))["seconds"] == 64.4


def test_a_run_by_hand_uses_one_gpu_for_each() -> None:
    import argparse

    options = argparse.Namespace(device="cuda", tiny=False, steps=None)
    words = [" ".join(one) for one in commands(options, "/runs")]
    assert words[-1].startswith("rlearner.cli start configs/quickstart.yaml ")
    assert words[-1].endswith(" --gpus 0")
    assert "rollout.cli --gpus 1 --run gpu" in words
    lines: list[dict[str, float]] = [
        {"eval/step": 40, "eval/success_rate": 0.6},
        {"step": 1},
        {"eval/step": 0, "eval/success_rate": 0.2},
    ]
    assert successes(lines) == [0.2, 0.6]
