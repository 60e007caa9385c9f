"""``make bundle`` and its install.sh without an index: what is missing, which files fit, and what a
target is told.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from requirements.bundle.build import (
    HERE,
    digest,
    locked_entries,
    main,
    missing_packages,
    oldest_glibc,
    platforms,
    read_present,
    split_file,
    write_checksums,
)

NEEDS = {"web": ["sockets>=2", "numbers"], "sockets": [], "numbers": ["digits"], "digits": []}


def requires(name: str) -> list[Requirement] | None:
    return [Requirement(line) for line in NEEDS[name]] if name in NEEDS else None


def test_what_a_target_lacks() -> None:
    wanted = [Requirement("torch>=2.9"), Requirement("web")]
    assert missing_packages(wanted, {"torch": "0"}, requires) == {
        "web",
        "sockets",
        "numbers",
        "digits",
    }
    present = {"torch": "2.11.0+cu130", "numbers": "0"}
    # what numbers needs is not looked at
    assert missing_packages(wanted, present, requires) == {"web", "sockets"}
    assert missing_packages(wanted, {**present, "sockets": "2.1", "web": "1"}, requires) == set()
    # too old
    assert missing_packages(wanted, {**present, "sockets": "1.9"}, requires) == {"web", "sockets"}


@pytest.mark.parametrize(("present", "version"), [({}, "none"), ({"torch": "2.8.0"}, "2.8.0")])
def test_torch_is_never_brought_along(present: dict[str, str], version: str) -> None:
    with pytest.raises(ValueError, match=rf"^HAVE: torch {version} is not allowed; .*torch>=2\.9$"):
        missing_packages([Requirement("torch>=2.9")], present, requires)


def test_names_of_present_packages(tmp_path: Path) -> None:
    assert read_present("torch,PyYAML , jinja2", "") == {"torch": "0", "pyyaml": "0", "jinja2": "0"}
    frozen = tmp_path / "freeze.txt"
    frozen.write_text(
        "torch==2.11.0+cu130\n# a comment\n-e /home/me/code\nmine @ file:///home/me/mine\nPillow==12.1\n"
    )
    assert read_present("", str(frozen)) == {"torch": "2.11.0+cu130", "pillow": "12.1"}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (
            ["--python", "2.7"],
            "TARGET_PYTHON: '2.7' is not allowed; a Python from 3.11 on, such as 3.12",
        ),
        (["--have", "torch,a b"], "HAVE: 'a b' is not allowed; NAME or NAME==VERSION"),
        (["--have", "torch>=2"], "HAVE: 'torch>=2' is not allowed; NAME or NAME==VERSION"),
        (["--have-file", "/nowhere"], "HAVE_FILE: /nowhere: No such file or directory"),
        (["--model", "/nowhere"], "MODEL: /nowhere: there is no such file"),
        (["--part-size", "0"], "PART_SIZE: 0 is not allowed; MiB from 1 on"),
    ],
)
def test_bad_options_get_one_line(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_the_oldest_c_library_of_wheels() -> None:
    old = "msgspec-0.22.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64.manylinux_2_28_x86_64.whl"
    # a file with several tags runs on the oldest
    assert oldest_glibc(["a-1-py3-none-any.whl", old]) == "2.17"
    assert oldest_glibc([old, "cryptography-50.0.2-cp311-abi3-manylinux_2_34_x86_64.whl"]) == "2.34"
    assert platforms()[0] == "manylinux_2_39_x86_64"
    assert len(platforms()) == len(set(platforms())) == 35 + 4


def test_entries_of_a_lock() -> None:
    text = "# Written\nPyNaCl==1.6.2 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
    text += "rich==15.0.0 \\\n    --hash=sha256:cc\n"
    entries = locked_entries(text)
    assert list(entries) == ["pynacl", "rich"]
    assert entries["pynacl"].count("--hash") == 2


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle for this machine with a model in two parts and no wheels, which pip refuses to
    install.
    """
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "bench").mkdir()
    source = tmp_path / "model.gguf"
    source.write_bytes(bytes(range(256)) * 6000)  # 1.46 MiB
    split_file(source, folder / "model", 1 << 20)
    for name in ("install.sh", "install.py"):
        shutil.copy(HERE / name, folder)
    manifest = {
        "python": ".".join(map(str, sys.version_info[:2])), "machine": "x86_64", "have": ["packaging"], "commit": "",
        "glibc": "2.17", "model": {"name": "model.gguf", "sha256": digest(source)},
    }  # fmt: skip
    write_manifest(folder, manifest)
    return folder


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "SHA256SUMS").unlink(missing_ok=True)
    write_checksums(folder)


def install(folder: Path, python: str = sys.executable) -> tuple[int, str]:
    """Return the exit code and the errors of install.sh."""
    environment = os.environ | {"PYTHON": python}
    command = ["sh", str(folder / "install.sh"), "--target", str(folder.parent / "site")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder.parent
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        (
            {"python": "3.99"},
            f"{sys.executable} is Python {sys.version_info[0]}.{sys.version_info[1]}; the bundle is for Python 3.99",
        ),
        ({"machine": "aarch64"}, "this machine is x86_64; the bundle is for aarch64"),
        ({"glibc": "2.99"}, "; the bundle needs 2.99 or newer"),
        (
            {"have": ["packaging", "no-such-package"]},
            " lacks no-such-package; build the bundle with HAVE without them",
        ),
    ],
)
def test_another_machine_is_told_why(bundle: Path, changed: dict[str, Any], error: str) -> None:
    write_manifest(bundle, json.loads((bundle / "manifest.json").read_text()) | changed)
    code, text = install(bundle)
    assert (code, text.count("\n"), text.startswith("error: "), error in text) == (
        2,
        1,
        True,
        True,
    ), text


def test_a_damaged_bundle_is_refused(bundle: Path) -> None:
    part = bundle / "model" / "model.gguf.part-001"
    data = part.read_bytes()
    part.write_bytes(data[:-1] + b"x")
    assert install(bundle) == (
        2,
        "error: model/model.gguf.part-001: wrong checksum; copy the bundle again\n",
    )
    part.unlink()
    assert install(bundle) == (2, "error: model/model.gguf.part-001: missing in the bundle\n")
    part.write_bytes(data)
    (bundle / "SHA256SUMS").unlink()
    assert install(bundle) == (2, f"error: {bundle / 'SHA256SUMS'}: missing in the bundle\n")
    assert install(bundle, "no-such-python") == (
        2,
        "error: PYTHON: there is no program no-such-python\n",
    )
    assert not (bundle.parent / "site").exists()
