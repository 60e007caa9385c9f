"""Real attempts to escape from the sandbox, and how to observe from outside whether one succeeds.

Where it is harmless, the same program run without a sandbox shows that it would succeed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Final

import psutil

from bench.support.escape_scene import GOT, LIMITS, EscapeAttempt, EscapeResult, EscapeScene, says

# the kernel ends what is left in a sandbox's namespace a moment after the sandbox itself
ENDS_WITHIN_S = 2.0


def called(scene: EscapeScene, _: EscapeResult) -> bool:
    return scene.called()


def killed(scene: EscapeScene, _: EscapeResult) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        scene.bystander.wait(0.2)
    return scene.bystander.poll() is not None


def wrote(scene: EscapeScene, result: EscapeResult) -> bool:
    return (scene.folder / "written").exists() or says(scene, result)


def outlived(scene: EscapeScene, _: EscapeResult) -> bool:
    left = [
        one
        for one in psutil.process_iter(["cmdline"])
        if scene.marker in (one.info["cmdline"] or [])
    ]
    alive = psutil.wait_procs(left, timeout=ENDS_WITHIN_S)[1]
    for one in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    return bool(alive)


def loud(_: EscapeScene, result: EscapeResult) -> bool:
    # what one read may bring on top
    return len(result.stdout) > (LIMITS.output_kib << 10) + (1 << 17)


def slow(_: EscapeScene, result: EscapeResult) -> bool:
    return result.seconds > 20 or GOT in result.stdout


ESCAPES: Final = (
    EscapeAttempt(
        "network", "socket.create_connection(('127.0.0.1', {port}), 2).sendall(b'x'); got()", called
    ),
    EscapeAttempt(
        "abstract_socket",
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0{abstract}'); got()",
        called,
    ),
    EscapeAttempt(
        "kernel_sockets",
        "for family in (socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):\n"
        "    try: socket.socket(family, socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_DGRAM); got()\n"
        "    except OSError: pass",
    ),
    EscapeAttempt(
        "host_proc",
        "for n in os.listdir('/proc'):\n    if n.isdigit() and b'sleep\\x00600' in read(f'/proc/{n}/cmdline'): got()",
    ),
    EscapeAttempt(
        "environment_of_others",
        "print(read('/proc/{pid}/environ')); print(read('/proc/%d/environ' % os.getppid()))",
    ),
    EscapeAttempt(
        "root_of_another",
        "print(*map(read, ('/proc/1/root{secret}', '/proc/1/cwd/secret', '/proc/self/cwd/../..{secret}')))",
    ),
    EscapeAttempt("ptrace", "if libc.ptrace(0x4206, {pid}, 0, 0) == 0: got()"),  # PTRACE_SEIZE
    EscapeAttempt(
        "ptrace_itself",
        "child = os.fork()\nif not child: time.sleep(5); os._exit(0)\nif libc.ptrace(0x4206, child, 0, 0) == 0: "
        "got()\nos.kill(child, 9)",
    ),
    EscapeAttempt(
        "fork_bomb",
        "children = []\ntry:\n    for _ in range(40):\n        child = os.fork()\n        if not child: "
        "time.sleep(30); os._exit(0)\n"
        "        children.append(child)\nexcept OSError: pass\nif len(children) >= 16: got()\nfor c in children: "
        "os.kill(c, 9)",
    ),
    EscapeAttempt(
        "symlinks",
        "os.symlink('{secret}', f'/tmp/link-{os.getpid()}'); p = f'/tmp/link-{os.getpid()}'; d = read(p); "
        "os.unlink(p); print(d)",
    ),
    EscapeAttempt(
        "environment",
        "print(dict(os.environ), read('/proc/self/environ'), read('/proc/1/environ'))",
    ),
    EscapeAttempt(
        "giant_output",
        "data = b'x' * 65536\nfor _ in range(64): os.write(1, data)",
        loud,
        how="output",
    ),
    EscapeAttempt("memory", "data = bytearray(400 << 20); got()", how="memory"),
    EscapeAttempt(
        "memory_of_many",
        "for _ in range(6):\n    if not os.fork(): d = b'x' * (50 << 20); time.sleep(20); got(); "
        "os._exit(0)\ntime.sleep(20)\ngot()",
        slow,
        harmless=False,
        how="memory",
    ),
    EscapeAttempt(
        "shared_memory",
        "import mmap\n"
        "try: m = mmap.mmap(-1, 400 << 20); got()\nexcept (OSError, MemoryError): pass\n"
        "try: fd = os.memfd_create('x'); os.ftruncate(fd, 400 << 20); got()\nexcept OSError: pass\n"
        "if libc.shmget(0, ctypes.c_size_t(400 << 20), 0o1600) >= 0: got()",
        harmless=False,
    ),
    EscapeAttempt("processor_time", "while True: pass", slow, harmless=False, how="time"),
    EscapeAttempt(
        "time",
        "for n in range(1, 32):\n    if n not in (9, 19): signal.signal(n, signal.SIG_IGN)\ntime.sleep(60); got()",
        slow,
        harmless=False,
        how="time",
        wall_s=1.0,
    ),
    EscapeAttempt(
        "writes_outside",
        "for path in ('{folder}/written', '/written', os.__file__ + '.new', '/usr/lib/written', '/dev/written', "
        "'/proc/sys/kernel/hostname'):\n"
        "    try: open(path, 'w').close()\n    except OSError: continue\n    got()\n    break\n",
        wrote,
    ),
    EscapeAttempt("setuid", "os.setuid(0) if os.getuid() else None\nos.setresuid(0, 0, 0); got()"),
    EscapeAttempt(
        "setuid_file",
        "import subprocess\nfor p in ('/usr/bin/su', '/bin/su', '/usr/bin/mount'):\n    if os.path.exists(p) and "
        "os.stat(p).st_mode & 0o4000: got()",
    ),
    EscapeAttempt(
        "mounting",
        "tried = [libc.unshare(0x10000000), libc.unshare(0x00020000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, "
        "b'')]\nif 0 in tried[:2]: got()",
        harmless=False,
    ),
    EscapeAttempt("namespaces", "if libc.unshare(0x00020000) == 0: got()"),
    EscapeAttempt("chroot", "os.chroot('/'); got()"),
    EscapeAttempt("signals", "os.kill({pid}, 9)", killed),
    EscapeAttempt("signals_to_all", "os.kill(-1, 9)", killed, harmless=False),
    EscapeAttempt(
        "files_of_the_system",
        "for p in ('/etc/shadow', '/etc/passwd', '/etc/hostname'):\n    if read(p): got()",
    ),
    EscapeAttempt(
        "home_and_repository",
        f"for p in ({os.path.abspath(__file__)!r}, {os.path.expanduser('~/.bashrc')!r}, '/work'):\n    if "
        f"os.path.exists(p): got()",
    ),
    EscapeAttempt(
        "devices",
        "for p in ('/dev/mem', '/dev/kmsg', '/dev/full', '/dev/random', '/dev/fuse', '/dev/kvm', '/dev/vda', "
        "'/dev/sda', '/dev/tty0'):\n"
        "    try: os.close(os.open(p, os.O_RDONLY | os.O_NONBLOCK)); got()\n    except OSError: pass",
    ),
    EscapeAttempt(
        "device_nodes",
        "p = f'/tmp/node-{os.getpid()}'\nos.mknod(p, 0o20600, os.makedev(1, 1)); os.unlink(p); got()",
    ),
    EscapeAttempt(
        "outliving",
        "if not os.fork():\n    os.setsid()\n    if os.fork(): os._exit(0)\n    null = os.open('/dev/null', 2)\n    "
        "for n in (0, 1, 2): os.dup2(null, n)\n"
        "    os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(25)', "
        "'{marker}'])\ntime.sleep(0.3)",
        outlived,
    ),
    EscapeAttempt(
        "huge_file",
        "p = f'/tmp/huge-{os.getpid()}'\nf = open(p, 'wb')\ntry: os.ftruncate(f.fileno(), 200 << 20); got()\nfinally: "
        "os.unlink(p)",
    ),
    EscapeAttempt(
        "many_files",
        "n = 0\ntry:\n    for n in range(8): open(f'/tmp/f{n}', 'wb', 0).write(b'x' * (8 << 20)) == 8 << 20 or 1 / 0\n "
        "   got()\nexcept (OSError, ZeroDivisionError): pass",
        harmless=False,
    ),
    EscapeAttempt(
        "deep_recursion",
        "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)\ngot()",
        slow,
        harmless=False,
        how="memory",
    ),
    EscapeAttempt("standard_input", "os.lseek(0, 0, 0); print(os.read(0, 1000))"),
    EscapeAttempt(
        "inherited_files",
        "for n in range(3, 256):\n    try: os.lseek(n, 0, 0); print(os.read(n, 1000))\n    except OSError: pass",
    ),
)
