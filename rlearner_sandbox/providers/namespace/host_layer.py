"""The root of a sandbox without an image: the host's programs, and little else of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

# Libraries, commands, certificates, time; no accounts, names or settings of services.
ETC: Final = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "protocols", "services",
    "localtime", "timezone", "ssl/certs", "ssl/openssl.cnf", "ca-certificates",
    "ca-certificates.conf", "pki/tls", "pki/ca-trust", "mime.types",
    "terminfo", "os-release", "debian_version",
)  # fmt: skip
LINKED: Final = ("bin", "sbin", "lib", "lib64", "lib32", "libx32")
FOLDERS: Final = {
    "tmp": 0o1777, "var/tmp": 0o1777, "var/log": 0o755, "var/lib": 0o755, "var/cache": 0o755,
    "root": 0o700, "home": 0o755, "run": 0o755, "opt": 0o755, "srv": 0o755, "mnt": 0o755,
    "usr": 0o755, "dev": 0o755, "proc": 0o755, "etc": 0o755,
}  # fmt: skip
FILES: Final = {
    "etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/sh\n"
    ),
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1\tlocalhost sandbox\n::1\tlocalhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/resolv.conf": "",
}
NETWORK_FILES: Final = ("/etc/resolv.conf", "/etc/hosts")


def write_host_root(folder: Path) -> None:
    """Write the folders, links and files of such a root to ``folder``."""
    # Explicit modes, since the umask of our processes keeps others out.
    folder.mkdir()
    folder.chmod(0o755)
    for name, mode in FOLDERS.items():
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(mode)
        if path.parent != folder:
            path.parent.chmod(0o755)
    for name in LINKED:
        path = Path("/", name)
        if path.is_symlink():
            (folder / name).symlink_to(os.readlink(path))
    for name in ETC:
        source = Path("/etc", name)
        target = folder / "etc" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.parent.chmod(0o755)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore_dangling_symlinks=True)
        elif source.exists():
            shutil.copyfile(source.resolve(), target)
            target.chmod(0o644)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="ascii")
        (folder / name).chmod(0o644)


def shown_folders() -> list[list[str]]:
    """Return which folders of the host such a sandbox shows, and where."""
    names = ["usr", *(name for name in LINKED if Path("/", name).is_dir())]
    paths = [f"/{name}" for name in names if not Path("/", name).is_symlink()]
    return [[path, path] for path in paths]


def network_files() -> list[list[str]]:
    """Return the files that name the host's network, for sandboxes that share it."""
    return [[os.path.realpath(path), path] for path in NETWORK_FILES if os.path.exists(path)]
