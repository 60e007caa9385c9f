"""A configuration of a stranger neither prints a secret of the environment nor hangs the command
that reads it.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

SECRET = "juniper-velvet-4711"
COPIES = {
    "plain": "name: ${oc.env:WANDB_API_KEY}",
    "quoted": "name: ${oc.env:'WANDB_API_KEY'}",
    "double-quoted": "name: '${oc.env:\"WANDB_API_KEY\"}'",
    "named-elsewhere": "n: WANDB_API_KEY\n  name: ${oc.env:${run.n}}",
    "named-in-parts": "n: API_KEY\n  name: ${oc.env:WANDB_${run.n}}",
    "in-a-text": "name: a-${oc.env:'WANDB_API_KEY'}-b",
    "decoded": "name: ${oc.decode:${oc.env:'WANDB_API_KEY'}}",
    "with-default": "name: ${oc.env:'WANDB_API_KEY',x}",
    "selected": "m: ${oc.env:'WANDB_API_KEY'}\n  name: ${oc.select:run.m}",
    "created": "name: ${oc.create:{a:${oc.env:'WANDB_API_KEY'}}}",
    "by-its-format": "name: ${oc.env:HARMLESS}",
    "by-its-key": "api_key: ${oc.env:'PLAIN'}",
}
NINE = ", ".join
BOMBS = {
    "aliases": "a0: &a0 [1]\n"
    + "".join(f"a{n}: &a{n} [{NINE([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)),
    "aliases-of-mappings": "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{p: *a{n - 1}, q: *a{n - 1}}}\n" for n in range(1, 60)),
    "merged": "a0: &a0 {x: 1}\n"
    + "".join(
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], y{n}: *a{n - 1}}}\n" for n in range(1, 60)
    ),
    "itself": "a: &a [*a]",
    "sequences": "a: " + "[" * 100_000,
    "sequences-that-close": "a: " + "[" * 900 + "]" * 900,
    "mappings": "a: " + "{b: " * 500 + "}" * 500,
    "blocks": "".join(" " * n + "a:\n" for n in range(900)),
    "own-root": "run: {name: '${oc.select:.,1}'}",
    "own-parent": "run: {name: '${run}'}",
    "own-value": "run: {name: '${run.name}'}",
    "own-values": "run: {name: '${oc.dict.values:run}'}",
    "size": "a: " + "x" * 2_000_000,
}


def check(folder: Path, text: str, *overrides: str) -> str:
    """Return what ``rlearner check`` says, in one line, within bounded memory and time."""
    file = folder / "run.yaml"
    file.write_text(text)
    environment = {
        "PATH": "/usr/bin:/bin",
        "WANDB_API_KEY": SECRET,
        "PLAIN": SECRET,
        "HARMLESS": f"ghp_{'Q7z' * 12}",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rlearner.cli", "check", str(file), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)),
    )
    assert done.returncode == 2, done
    for secret in (SECRET, environment["HARMLESS"]):
        assert secret not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    return done.stderr


@pytest.mark.parametrize("attack", COPIES)
def test_interpolations_copy_no_secret(attack: str, tmp_path: Path) -> None:
    assert "would store a secret with the run; write {env: " in check(
        tmp_path, f"run:\n  {COPIES[attack]}\n"
    )


def test_overrides_copy_no_secret(tmp_path: Path) -> None:
    said = check(tmp_path, "run: {seed: 1}", "run.name=${oc.env:'WANDB_API_KEY'}")
    assert "run.name: ${oc.env:WANDB_API_KEY} would store a secret with the run" in said


@pytest.mark.parametrize("attack", BOMBS)
def test_bombs_end_in_one_line(attack: str, tmp_path: Path) -> None:
    assert "run.yaml" in check(tmp_path, BOMBS[attack])


@pytest.mark.parametrize("attack", ["sequences-that-close", "mappings"])
def test_bombs_of_overrides(attack: str, tmp_path: Path) -> None:
    assert "override" in check(
        tmp_path, "run: {seed: 1}", f"run.name={BOMBS[attack].removeprefix('a: ')}"
    )
