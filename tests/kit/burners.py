"""Busy loops that take the processor from what is tested; they end with their parent, or after an
hour.

Usage: python tests/kit/burners.py COUNT COMMAND ... runs a command next to so many; its exit code
is the command's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LIMIT_S: Final = 3600
LOOP: Final = """
import os, sys, time
parent, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while os.getppid() == parent and time.monotonic() < end:
    sum(range(100_000))
"""


@contextmanager
def burners(count: int, limit_s: float = LIMIT_S) -> Iterator[list[int]]:
    """Run busy loops with the priority of this process; yields their process ids."""
    command = [sys.executable, "-I", "-S", "-c", LOOP]
    children = [subprocess.Popen([*command, str(os.getpid()), str(limit_s)]) for _ in range(count)]
    try:
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    with burners(int(sys.argv[1])):
        code = subprocess.run(sys.argv[2:], check=False).returncode
    sys.exit(code)
