"""A headless Chromium for the console's bench and tests, driven by Playwright, which `make
test-console` installs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from broker.errors import NotInstalled

CHROMIUM: Final = os.environ.get("RL_CHROMIUM", "/usr/bin/chromium")
PACKAGES: Final = Path(__file__).parents[2] / ".venv-console"
FLAGS: Final = (
    *(
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync"),
)


def async_playwright() -> Any:
    """Return Playwright's context manager.

    Raises:
        NotInstalled: if it or Chromium is not there.
    """
    if PACKAGES.is_dir() and str(PACKAGES) not in sys.path:
        sys.path.append(str(PACKAGES))
    try:
        from playwright import async_api
    except ImportError:
        raise NotInstalled("Playwright is not there; make test-console installs it") from None
    if not Path(CHROMIUM).exists():
        raise NotInstalled(
            f"{CHROMIUM} is not there; apt-get install chromium, or set RL_CHROMIUM"
        ) from None
    return async_api.async_playwright()
