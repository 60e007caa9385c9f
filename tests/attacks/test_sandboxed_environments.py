"""An environment that executes what the policy writes cannot leave its sandbox.

Each attempt is made twice: with ``isolation: process``, where it works, and in the sandbox, where
it must not.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from broker.settings.config import DomainSection
from envhub.domain import Domain, load_domain
from envhub.workers.calls import CallFailed
from envhub.workers.sandboxed import require
from envhub.workers.worker_pool import WorkerPools
from rlearner_sandbox import NoSandbox

pytestmark = pytest.mark.sandbox

EXECUTES = '''
import contextlib, io
from broker.settings.config import Section
from envhub.envs.base import Environment, Observation, StepResult

class Executes(Environment):
    """Executes what the policy writes."""

    Args = Section

    def reset(self, task_index, split, seed):
        return Observation("?")

    def step(self, text):
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                exec(text, {})
        except BaseException as error:
            print(type(error).__name__, error, file=out)
        return StepResult(observation=Observation(out.getvalue()), reward=0.0, done=True)
'''


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder with a secret and the environment's own file."""
    (tmp_path / "environment.py").write_text(EXECUTES)
    (tmp_path / "hub.key").write_text("very secret")
    (tmp_path / "hub.key").chmod(0o644)  # it must not even be seen
    return tmp_path


def made(victim: Path, isolation: str, **more: object) -> Domain:
    section = {
        "env": f"{victim}/environment.py:Executes",
        "isolation": isolation,
        "rewards": [],
        **more,
    }
    return load_domain("d", DomainSection.model_validate(section))


async def executed(victim: Path, isolation: str, program: str, **more: object) -> str:
    pools = WorkerPools(None)
    try:
        environment = await pools.environment(made(victim, isolation, **more))
        await environment.constructor()
        await environment.reset(0, "train", 1)
        found = (await environment.step(program)).observation.text
        await environment.close()
    finally:
        await pools.close()
    return found.strip()


ISOLATION = pytest.mark.parametrize("isolation", ["process", "sandbox"])


@ISOLATION
async def test_it_reads_no_file_of_its_hub(victim: Path, isolation: str) -> None:
    found = await executed(victim, isolation, f"print(open({str(victim / 'hub.key')!r}).read())")
    assert (
        found == "very secret" if isolation == "process" else found.startswith("FileNotFoundError")
    )


@ISOLATION
async def test_it_sees_no_home_folder_and_no_key_folder(victim: Path, isolation: str) -> None:
    program = "import os; print(sorted(os.listdir(os.path.expanduser('~'))) if os.access(os.path.expanduser('~'), 4) else [])"
    found = await executed(victim, isolation, program)
    seen = set(eval(found)) if found.startswith("[") else set()
    whole = set(os.listdir(Path.home()))
    assert seen == whole if isolation == "process" else seen <= {".pyenv"}, found


@ISOLATION
async def test_it_writes_nothing_outside(victim: Path, isolation: str) -> None:
    target = victim / "planted"
    program = f"open({str(target)!r}, 'w').write('x'); print('written')"
    found = await executed(victim, isolation, program)
    assert target.exists() == (isolation == "process"), found


async def test_it_replaces_neither_its_own_code_nor_python(victim: Path) -> None:
    for target in (
        victim / "environment.py",
        Path(sys.prefix) / "pyvenv.cfg",
        Path("/usr/bin/env"),
    ):
        before = target.read_bytes()
        found = await executed(victim, "sandbox", f"open({str(target)!r}, 'w').write('x')")
        assert found.startswith(("OSError", "PermissionError", "FileNotFoundError")), found
        assert target.read_bytes() == before


@ISOLATION
async def test_it_reaches_no_service_of_its_host(victim: Path, isolation: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
        )
        found = await executed(victim, isolation, program)
    assert found == "connected" if isolation == "process" else "Error" in found, found


async def test_it_reaches_the_network_if_the_user_says_so(victim: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('connected')"
        )
        assert await executed(victim, "sandbox", program, network=True) == "connected"


@ISOLATION
async def test_it_reaches_no_abstract_socket_with_the_network_of_its_host(
    victim: Path, isolation: str
) -> None:
    """They belong to the network, have no permissions, and desktops and containers listen at them."""
    name = f"rlearner-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        program = f"import socket; s = socket.socket(1); s.connect('\\0{name}'); print('connected')"
        more = {"network": True} if isolation == "sandbox" else {}
        found = await executed(victim, isolation, program, **more)
    has_scopes = ctypes.CDLL(None).syscall(444, None, 0, 1) >= 6  # of Landlock
    assert (found == "connected") == (isolation == "process" or not has_scopes), found


@ISOLATION
async def test_it_kills_no_other_process(victim: Path, isolation: str) -> None:
    target = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: ASYNC220
    try:
        program = f"import os; os.kill({target.pid}, {int(signal.SIGKILL)}); print('killed')"
        found = await executed(victim, isolation, program)
        await asyncio.sleep(0.2)
        assert (target.poll() is not None) == (isolation == "process"), found
    finally:
        target.kill()
        target.wait()


@ISOLATION
async def test_it_sees_no_other_process(victim: Path, isolation: str) -> None:
    found = await executed(
        victim, isolation, "import os; print(sum(one.isdigit() for one in os.listdir('/proc')))"
    )
    assert int(found) >= len(psutil.pids()) / 2 if isolation == "process" else int(found) <= 5


@ISOLATION
async def test_it_has_a_user_of_its_own(victim: Path, isolation: str) -> None:
    found = await executed(victim, isolation, "import os; print(os.getuid())")
    assert (int(found) == os.geteuid()) == (isolation == "process" or os.geteuid() != 0)


async def test_it_gains_no_privileges(victim: Path) -> None:
    found = await executed(
        victim,
        "sandbox",
        "print(*[x for x in open('/proc/self/status') if x[:3] in ('Cap', 'NoN')])",
    )
    values = dict(line.split() for line in found.splitlines())
    assert {values[name] for name in ("CapPrm:", "CapEff:", "CapAmb:")} == {"0000000000000000"}
    assert values["NoNewPrivs:"] == "1"
    for program in (
        "import os; os.setuid(0)",
        "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))",
    ):
        found = await executed(victim, "sandbox", program)
        assert "PermissionError" in found or found == "-1" or (os.geteuid() != 0 and found == ""), (
            found
        )


@ISOLATION
async def test_it_sees_few_settings_of_its_host(victim: Path, isolation: str) -> None:
    """Accounts, services and their keys are settings, too; programs need names, certificates and
    libraries.
    """
    found = set(eval(await executed(victim, isolation, "import os; print(os.listdir('/etc'))")))
    secret = {"shadow", "sudoers", "ssh", "machine-id", "fstab", "crontab", "environment"} & set(
        os.listdir("/etc")
    )
    assert secret <= found if isolation == "process" else not secret & found
    assert {"passwd", "ld.so.cache"} & set(os.listdir("/etc")) <= found


async def test_it_has_names_and_certificates(victim: Path) -> None:
    program = "import pwd, ssl, time; print(pwd.getpwuid(0).pw_name, len(ssl.create_default_context().get_ca_certs()))"
    expected = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", program], capture_output=True, text=True
    ).stdout.strip()
    assert await executed(victim, "sandbox", program) == expected
    if os.access("/etc/resolv.conf", os.R_OK):
        resolved = await executed(
            victim, "sandbox", "print(*open('/etc/resolv.conf'))", network=True
        )
        assert "Error" not in resolved


GROWS = {
    "socket": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 7, 1 << 22)\nprint('grew')",
    "received": "import socket\na, b = socket.socketpair()\na.setsockopt(1, 8, 1 << 22)\nprint('grew')",
    "pipe": "import fcntl, os\na, b = os.pipe()\nfcntl.fcntl(a, 1031, 1 << 20)\nprint('grew')",
}


@ISOLATION
@pytest.mark.parametrize("buffer", GROWS)
async def test_it_holds_no_memory_outside_its_limit(
    victim: Path, isolation: str, buffer: str
) -> None:
    """What lies in buffers of the kernel counts towards no process."""
    found = await executed(victim, isolation, GROWS[buffer])
    assert found == "grew" if isolation == "process" else found.startswith("PermissionError"), found


NEWER = {"open_tree": 428, "fsopen": 430, "mount_setattr": 442, "statmount": 457, "listmount": 458, "lsm": 459,
         "open_tree_attr": 467, "unknown": 999}  # fmt: skip


@pytest.mark.parametrize("call", NEWER)
async def test_it_reaches_no_call_that_was_not_reviewed(victim: Path, call: str) -> None:
    program = (
        f"import ctypes, errno; c = ctypes.CDLL(None, use_errno=True); c.syscall({NEWER[call]}, -1, 0, 0, 0); "
        "print(errno.errorcode[ctypes.get_errno()])"
    )
    assert await executed(victim, "sandbox", program) == "ENOSYS"


async def test_what_the_user_names_is_readable(victim: Path) -> None:
    program = f"print(open({str(victim / 'hub.key')!r}).read())"
    assert (
        await executed(victim, "sandbox", program, readable=[str(victim / "hub.key")])
        == "very secret"
    )


async def test_its_processes_end_with_its_pool(victim: Path) -> None:
    pools = WorkerPools(None)
    environment = await pools.environment(made(victim, "sandbox"))
    await environment.constructor()
    marker = f"marker{os.getpid()}"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{marker}'])"
    await environment.step(program)

    def left() -> list[int]:
        return [
            one.pid
            for one in psutil.process_iter(["cmdline"])
            if marker in (one.info["cmdline"] or [])
        ]

    assert left()
    assert pools.cpu_s() > 0
    await environment.close()
    await pools.close()
    ends = time.monotonic() + 20
    while left() and time.monotonic() < ends:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert left() == []


async def test_a_crash_costs_only_its_own_worker(victim: Path) -> None:
    pools = WorkerPools(None)
    first, second = [await pools.environment(made(victim, "sandbox")) for _ in range(2)]
    for one in (first, second):
        await one.constructor()
        await one.reset(0, "train", 1)
    with pytest.raises(CallFailed, match="died by SIGSEGV"):
        await first.step("import os; os.kill(os.getpid(), 11)")
    assert (await second.step("print(2)")).observation.text == "2\n"
    await first.close()
    await second.close()
    await pools.close()


def test_without_bubblewrap_one_line_says_what_to_do(
    victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        NoSandbox,
        match=r"^domains\.d\.isolation: sandbox does not work here: there is no bubblewrap",
    ):
        require(made(victim, "sandbox"))
    require(made(victim, "process"))
