"""The calendar clocks of the processes started with it, set together while they run, as ``date -s``
would. Everyone else's stay true.
"""

from __future__ import annotations

import mmap
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class NoLibraryError(Exception):
    """It cannot be built here; says why."""


class ShiftedClock:
    """Builds the library to preload, and holds the offset that it adds.

    Args:
        folder: for the library and the file with the offset.

    Raises:
        NoLibraryError: there is no C compiler, or this is no Linux with glibc 2.30 or newer.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise NoLibraryError("there is no C compiler")
        self.library, self._file = folder / "shifted_clock.so", folder / "shifted_clock.offset"
        command = [
            compiler,
            "-shared",
            "-fPIC",
            "-O2",
            "-Wall",
            "-Werror",
            "-o",
            str(self.library),
            str(SOURCE),
            "-pthread",
        ]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if built.returncode:
            raise NoLibraryError(
                f"{compiler} cannot build {SOURCE.name}: {built.stderr.strip()[-300:]}"
            )
        self._file.write_bytes(bytes(8))
        with self._file.open("r+b") as file:
            self._offset = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be started with; its children have it from there."""
        return {"LD_PRELOAD": str(self.library), "SHIFTED_CLOCK_FILE": str(self._file)}

    def set(self, offset_s: int) -> None:
        """All clocks show the true time and that many seconds, from this moment on."""
        self._offset[0] = offset_s

    def in_process(self, pid: int) -> bool:
        """Whether that process goes by it."""
        maps = Path(f"/proc/{pid}/maps").read_text()
        return str(self.library) in maps and str(self._file) in maps
