"""The steps of ``python -m bench.gpu`` in their order, and why one is left out. Pure but for
looking at packages.
"""

from __future__ import annotations

import glob
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

TINY: Final = ("--device", "cpu", "--tiny")
GGUF: Final = "models/*.gguf"  # where install.sh leaves the model of a bundle


@dataclass(frozen=True)
class Machine:
    """The devices, by the step ``driver``; ``kind`` cpu runs everything small, to show that it
    runs.
    """

    kind: Literal["cuda", "cpu"]
    devices: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.devices[0] if len(set(self.devices)) == 1 else ", ".join(self.devices)


@dataclass(frozen=True)
class Step:
    """One measurement, in a process of its own.

    Attributes:
        shows: what it shows, in a few words.
        module: run with ``python -m``; left out if it does not exist.
        options: on a GPU; on a CPU ``cpu``.
        least_s: with less time it does not begin; what it takes on one H100, rounded up.
        limit_s: after which it is ended.
        figures: names of its results that the table shows.
        gpus: that it needs.
        packages: that it needs.
        files: that it needs, as patterns from the current folder.
    """

    name: str
    shows: str
    module: str
    options: tuple[str, ...]
    least_s: float
    limit_s: float
    figures: tuple[str, ...]
    cpu: tuple[str, ...] = TINY
    gpus: int = 1
    packages: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    def command(self, machine: Machine) -> list[str]:
        """Return the words that start it."""
        return [
            sys.executable,
            "-m",
            self.module,
            *(self.cpu if machine.kind == "cpu" else self.options),
        ]


ENGINE: Final = ("tokens_per_s_64", "ratio_64", "tokens_per_s", "ratio", "identical_tokens")
VLLM: Final = ("--engine", "vllm", "--engine-args", '{"gpu_memory_utilization": 0.4}')

# The first decides whether the others can work at all; then what is short and says most, the
# longest last.
STEPS: Final = (
    Step("driver", "driver, torch and NCCL; a collective over all GPUs", "bench.gpu.driver", (), 5, 90,
         ("driver", "torch", "cuda", "nccl", "transformers", "sm_mhz_max", "power_limit_w", "all_reduce_gbytes_per_s"),
         cpu=("--device", "cpu")),
    Step("weights", "weights packed and digested, and by NCCL, against a copy", "bench.gpu.weights",
         ("--repeats", "5"), 15, 90,
         ("device_copy_gbytes_per_s", "pack_gbytes_per_s", "digest_gbytes_per_s", "to_host_gbytes_per_s",
          "broadcast_gbytes_per_s", "ratio_transfer"), cpu=(*TINY, "--repeats", "2")),
    Step("ipc", "weights by CUDA IPC, and a learner killed while it is read", "bench.gpu.ipc", ("--repeats", "5"),
         20, 90, ("ipc_gbytes_per_s", "ratio_to_copy", "ratio_to_local"), cpu=(*TINY, "--repeats", "2")),
    Step("checks", "what only a GPU runs, against the CPU", "bench.gpu.checks", (), 60, 120,
         ("held", "made"), cpu=TINY),
    Step("learner", "a training step of the backend torch", "bench.gpu.learner", ("--repeats", "2"), 55, 150,
         ("tokens_per_s", "mfu", "mfu_causal", "memory_gib", "plan_gib", "tokens_per_s_4096", "mfu_4096",
          "mfu_causal_4096", "memory_gib_4096"), cpu=(*TINY, "--repeats", "1")),
    Step("engine-hf", "engine hf behind a server against it bare", "bench.gpu.engine", ("--pairs", "2"), 100, 240,
         ENGINE, cpu=(*TINY, "--pairs", "1")),
    Step("graphs", "engine hf with CUDA graphs against it without", "bench.gpu.graphs", ("--pairs", "1"), 50, 120,
         ("tokens_per_s_64", "ratio_64", "tokens_per_s", "ratio", "identical_tokens"), cpu=(*TINY, "--pairs", "1")),
    Step("update", "new weights while engine hf generates", "bench.gpu.update",
         ("--pairs", "2", "--window-s", "5"), 50, 90, ("tokens_lost_share", "pause_ms", "update_ms", "tokens_per_s"),
         cpu=(*TINY, "--pairs", "1")),
    Step("quickstart", "a whole run; success before and after", "bench.gpu.quickstart", (), 65, 180,
         ("success_before", "success_after", "seconds", "audit"), cpu=("--device", "cpu", "--tiny")),
    Step("shared", "learner and server taking turns on one GPU", "bench.shared", (), 60, 150,
         ("turn_s", "sleep_s", "load_s", "offload_s", "wake_s", "params_m"), cpu=("--params-m", "1", "--steps", "3")),
    Step("real", "a pretrained model learns additions; success before and after", "bench.gpu.real", (), 90, 240,
         ("success_before", "success_after", "step_s", "seconds", "audit"), packages=("gguf",), files=(GGUF,)),
    Step("families", "engine hf on every model family against transformers",
         "bench.gpu.families", (), 125, 240, ("families", "exact", "graphs")),
    Step("engine-vllm", "engine vllm behind a server against it bare", "bench.gpu.engine",
         (*VLLM, "--pairs", "2"), 120, 300, ENGINE, cpu=(*TINY, *VLLM, "--pairs", "1"), packages=("vllm",)),
    Step("launch", "learner on GPU 0, server on GPU 1, by today's launch lines", "bench.gpu.quickstart",
         ("--by-hand",), 60, 200, ("success_after", "seconds", "audit"), gpus=2,
         cpu=("--device", "cpu", "--tiny", "--by-hand")),
    Step("run", "a whole run with half a billion parameters", "bench.gpu.run", ("--steps", "8"), 220, 300,
         ("perf/tokens_per_s", "time/train", "time/broadcast_weights"), cpu=(*TINY, "--steps", "1")),
)  # fmt: skip


def exists(name: str) -> bool:
    """Return whether a module or package is installed here."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def why_left_out(
    step: Step, machine: Machine, left_s: float, installed: Callable[[str], bool] = exists
) -> str:
    """Return why a step does not run now; empty if it does.

    Args:
        left_s: seconds of the whole that are left.
    """
    if not installed(step.module):
        return f"{step.module} is not in this version"
    if lacking := [name for name in step.packages if not installed(name)]:
        return f"{', '.join(lacking)} is not installed"
    if len(machine.devices) < step.gpus:
        return f"it needs {step.gpus} GPUs, and there is {len(machine.devices)}"
    if absent := [pattern for pattern in step.files if not glob.glob(pattern)]:
        return f"there is no {absent[0]}"
    if step.least_s > left_s:
        return f"it takes {step.least_s:g} s, and {max(0.0, left_s):.0f} s are left; --minutes allows more"
    return ""


def chosen(names: Sequence[str], steps: Sequence[Step] = STEPS) -> list[Step]:
    """Return the steps of these names in their order; all without names. A name is a step's or its
    beginning.
    """
    wanted = [
        step for step in steps if not names or any(step.name.startswith(name) for name in names)
    ]
    if unknown := [name for name in names if not any(step.name.startswith(name) for step in steps)]:
        raise ValueError(
            f"--only {unknown[0]}: no such step; there are {', '.join(step.name for step in steps)}"
        )
    return wanted
