"""A process may open as many files as its machine permits, and says so where that is too few for a
fleet.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
from broker.runtime.process import main
async def body(stop):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
sys.exit(main("envhub", body))
"""


@pytest.mark.parametrize(("hard", "warned"), [(4096, False), (512, True)])
def test_the_limit_is_raised_to_what_the_machine_permits(hard: int, warned: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(hard)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == [str(hard), str(hard)]
    assert ("at most 512 open files" in done.stderr) == warned
