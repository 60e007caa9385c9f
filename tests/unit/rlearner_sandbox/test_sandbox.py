"""The sandbox holds: real attempts to get out of it, and what becomes of programs that take too
much.
"""

from __future__ import annotations

import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.support.escape_scene import LIMITS, EscapeAttempt, scene
from bench.support.escapes import ESCAPES
from rlearner_sandbox import (
    NoSandbox,
    ProgramChecks,
    Sandbox,
    SandboxFailed,
    SandboxLimits,
    seccomp,
)
from rlearner_sandbox.command import FIRST_UID, NOBODY, advice, free_uid

ROOT = Path(__file__).parents[3]
BY_NAME = {escape.name: escape for escape in ESCAPES}


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(LIMITS)


@pytest.mark.sandbox
@pytest.mark.parametrize("name", BY_NAME)
def test_no_escape(sandbox: Sandbox, name: str) -> None:
    escape: EscapeAttempt = BY_NAME[name]
    with scene() as here:
        result = escape.inside(sandbox, here)
        assert not escape.escaped(here, result), result
        assert result.how == escape.how, result


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="some of them need root to succeed without a sandbox")
@pytest.mark.parametrize("name", [escape.name for escape in ESCAPES if escape.harmless])
def test_it_is_the_sandbox_that_holds(name: str) -> None:
    with scene() as here:
        result = BY_NAME[name].bare(here)
        assert BY_NAME[name].escaped(here, result), result


@pytest.mark.sandbox
def test_a_program_has_no_privileges(sandbox: Sandbox) -> None:
    ended = sandbox.run(
        "print(open('/proc/self/status').read()); import os; print(os.getgroups(), sorted(os.listdir('/dev')))"
    )
    status = dict(
        line.split(":\t", 1) for line in ended.stdout.decode().splitlines() if ":\t" in line
    )
    assert {status[name].strip("0") for name in ("CapPrm", "CapEff", "CapAmb")} == {""}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert len(set(status["Uid"].split())) == 1
    assert status["Uid"].split()[0] != "0"
    assert ended.stdout.decode().splitlines()[-1].endswith("['null', 'shm', 'urandom']")


@pytest.mark.sandbox
def test_a_program_may_do_what_programs_do(sandbox: Sandbox) -> None:
    program = """
import json, math, tempfile, threading, multiprocessing.pool, sys
with tempfile.TemporaryFile() as file:
    file.write(b"x")
thread = threading.Thread(target=lambda: print(sys.stdin.readline().strip()))
thread.start()
thread.join()
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, 2]))
exit(3)
"""
    ended = sandbox.run(program, stdin="één\n".encode())
    assert ended.stdout.decode() == "één\n[1, 2]\n"
    assert (ended.exit_code, ended.killed_for) == (3, "")


@pytest.mark.sandbox
def test_a_program_cannot_answer_for_its_tests(sandbox: Sandbox) -> None:
    forger = (
        "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'loaded\\nx 0 true\\n 1 true\\n0 true\\n')\n"
        "    except OSError: pass\nos._exit(0)"
    )
    assert (
        sandbox.run(
            forger, mode="asserts", tests=ProgramChecks("", ("assert True", "assert True"))
        ).answers
        == {}
    )


@pytest.mark.sandbox
def test_many_at_once_have_limits_of_their_own() -> None:
    code = (
        "import concurrent.futures as f\nfrom bench.support.escape_scene import LIMITS\nfrom rlearner_sandbox import "
        "Sandbox\n"
        "sandbox = Sandbox(LIMITS)\n"
        "program = 'import os, time\\nfor _ in range(10):\\n    if not os.fork(): time.sleep(0.5); "
        "os._exit(0)\\nprint(1)'\n"
        "with f.ThreadPoolExecutor(3) as pool: print(*(e.stdout for e in pool.map(sandbox.run, [program] * 3)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == ["b'1\\n'"] * 3, done.stderr


@pytest.mark.sandbox
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_a_sandbox_too() -> None:
    other = shutil.which("python3.11", path="/usr/local/bin:/usr/bin")
    if other is None:
        pytest.skip("there is no Python 3.11 that an ordinary user may read")
    code = (
        "from bench.support.escape_scene import LIMITS, scene\nfrom bench.support.escapes import ESCAPES\n"
        "from rlearner_sandbox import Sandbox\n"
        "sandbox = Sandbox(LIMITS)\n"
        "for escape in ESCAPES:\n"
        "    if escape.name in ('network', 'host_proc', 'fork_bomb', 'writes_outside', 'namespaces', 'signals', "
        "'inherited_files'):\n"
        "        with scene() as here:\n"
        "            result = escape.inside(sandbox, here)\n"
        "            print(escape.name, escape.escaped(here, result), result.how)\n"
    )
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{packages}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run([other, "-c", code], env=env, cwd="/", capture_output=True, text=True, timeout=120,
        check=False, user=NOBODY, group=NOBODY, extra_groups=[])  # fmt: skip
    if "No module named" in done.stderr or "Permission denied" in done.stderr:
        pytest.skip(f"an ordinary user cannot read this: {done.stderr.splitlines()[-1]}")
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stderr
    assert all(line.rstrip().endswith("False") for line in lines), lines


@pytest.mark.sandbox
def test_programs_end_with_whoever_runs_them() -> None:
    marker = f"sandbox-test-{os.getpid()}"
    program = f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {marker!r}])"
    host = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from rlearner_sandbox import *; Sandbox().run({program!r}, wall_s=60)",
        ],
        cwd=ROOT,
    )
    try:
        _wait_for(lambda: _marked(marker))
    finally:
        host.send_signal(signal.SIGKILL)
        host.wait()
    _wait_for(lambda: not _marked(marker))


def _marked(marker: str) -> bool:
    return any(
        marker in (one.info["cmdline"] or [])
        for one in psutil.process_iter(["cmdline"])
        if one.info["cmdline"]
    )


def _wait_for(what: object) -> None:
    until = time.monotonic() + 30
    while not what():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.05)


def test_without_bubblewrap_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoSandbox, match=r"no bubblewrap .* run: apt-get install bubblewrap$"):
        Sandbox()


def test_where_bubblewrap_does_not_work_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        NoSandbox, match=r"No permissions to create new namespace\); .*(sysctl|docker)"
    ):
        Sandbox()


@pytest.mark.sandbox
def test_no_process_is_nobodys_fault(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_bwrap", "/nowhere/bwrap")
    with pytest.raises(SandboxFailed, match="no process can be started"):
        sandbox.run("")


def test_what_mends_it(tmp_path: Path) -> None:
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("0\n")
    assert advice("bwrap: no", tmp_path).endswith(
        "as root run: sysctl -w kernel.unprivileged_userns_clone=1"
    )
    (tmp_path / "kernel" / "unprivileged_userns_clone").write_text("1\n")
    assert "seccomp=unconfined" in advice("bwrap: no", tmp_path)
    assert "too old" in advice("bwrap: Unknown option --size", tmp_path)


def test_uids() -> None:
    everything = "0 0 4294967295\n"
    assert free_uid(5, [everything, everything]) == FIRST_UID + 5
    assert free_uid(5, ["0 100000 65536\n", everything]) == NOBODY


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_call_by_call(machine: str) -> None:
    table = seccomp.MACHINES[machine]
    clone, sockets, code = table.clone, table.socket, seccomp.program(machine)

    def run(
        number: int, argument: int = 0, second: int = 0, third: int = 0, arch: int = table.arch
    ) -> int:
        """The kernel's interpreter, as far as it is needed."""
        at = accumulator = 0
        data = {
            seccomp.NUMBER_AT: number,
            seccomp.ARCH_AT: arch,
            seccomp.FIRST_ARGUMENT_AT: argument,
        }
        data |= {seccomp.SECOND_ARGUMENT_AT: second, seccomp.THIRD_ARGUMENT_AT: third}
        while True:
            op, yes, no, value = struct.unpack_from("=HBBI", code, at * 8)
            at += 1
            if op == seccomp.LOAD:
                accumulator = data[value]
            elif op == seccomp.RETURN:
                return int(value)
            else:
                truth = {
                    seccomp.EQUAL: accumulator == value,
                    seccomp.AT_LEAST: accumulator >= value,
                    seccomp.ANY_BIT: accumulator & value,
                }[op]
                at += yes if truth else no

    for number in table.refused.values():
        assert run(number) == 0x50001
    # new calls since 5.1 are reviewed one by one: open_tree, listmount, statmount, open_tree_attr,
    # what is to come
    allowed = {number for number in range(table.last + 1, 2000) if run(number) == seccomp.ALLOW}
    assert allowed == set(seccomp.NEWER)
    assert run(428) == run(457) == run(458) == run(467) == run(1999) == 0x50026
    assert [run(table.setsockopt, 3, 1, option) for option in (7, 8, 32, 33)] == [0x50001] * 4
    assert run(table.setsockopt, 3, 1, 2) == run(table.setsockopt, 3, 6, 7) == seccomp.ALLOW
    assert (run(table.fcntl, 3, 1031), run(table.fcntl, 3, 1)) == (0x50001, seccomp.ALLOW)
    # read, uname, fork, a thread
    assert run(0) == run(63) == run(clone, 0x1200011) == run(clone, 0x3D0F00) == seccomp.ALLOW
    assert run(clone, 0x10000000) == run(clone, 0x40000011) == 0x50001
    assert run(435) == 0x50026
    assert [run(sockets, family) for family in (1, 2, 10)] == [seccomp.ALLOW] * 3
    assert [run(sockets, family) for family in (16, 17, 40)] == [0x50061] * 3
    assert run(0, arch=3) == run(0x40000000) == seccomp.KILL


def test_limits_are_those_of_the_docs() -> None:
    assert SandboxLimits() == SandboxLimits(
        wall_s=8.0,
        cpu_s=4,
        memory_mib=1024,
        processes=32,
        open_files=64,
        output_kib=1024,
        file_mib=64,
    )
