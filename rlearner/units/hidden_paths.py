"""Paths that the units do not see, because ProtectHome and PrivateTmp hide them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from broker.contract.wire import PlainSettings
from broker.errors import ConfigError

HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")
# A class or function in a file: ./lake.py:Lake.
ATTRIBUTE: Final = re.compile(r":[A-Za-z_][A-Za-z0-9_.]*$")


def check_config_paths(config: PlainSettings) -> None:
    """Check that the units see every absolute path in a configuration.

    Paths in the arguments of plug-ins count too, so every text that starts with ``/`` and is one
    word is taken for a path.

    Raises:
        ConfigError: names the first key whose path is hidden.
    """
    for key, text in _iterate_texts(config):
        path = ATTRIBUTE.sub("", text.removeprefix("file://"))
        if not path.startswith("/") or len(path.split()) != 1:
            continue
        if (place := _hidden_place(path)) is not None:
            link = "" if place == os.path.normpath(path) else f"it leads to {place}, and "
            raise ConfigError(
                key,
                text,
                f"{link}units do not see {', '.join(HIDDEN)} (ProtectHome, PrivateTmp): put it "
                "below /var/lib/rlearner or /opt, or name it relative to /var/lib/rlearner",
            )


def check_bin_folder(folder: str) -> None:
    """Check that the units see the folder of rlearner's programs, and the Python that runs them.

    Raises:
        ConfigError: if it is hidden.
    """
    link = ""
    place = _hidden_place(folder)
    if place is None:
        # A virtual environment may be of a Python in somebody's home, as those of uv and pyenv.
        place = _hidden_place(os.path.join(folder, "python"))
        link = f"its python leads to {place}, and "
    if place is not None:
        raise ConfigError(
            "--bin", folder, f"{link}units do not see {', '.join(HIDDEN)}: use /opt/rlearner"
        )


def _hidden_place(path: str) -> str | None:
    """Return where a path leads if that is hidden; links are those of this host."""
    for place in (os.path.normpath(path), os.path.realpath(path)):
        if any(Path(place).is_relative_to(folder) for folder in HIDDEN):
            return place
    return None


def _iterate_texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text of a configuration with its dotted key."""
    entries: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        entries = iter(value.items())
    elif isinstance(value, list):
        entries = iter(enumerate(value))
    for name, entry in entries:
        yield from _iterate_texts(entry, f"{key}.{name}" if key else str(name))
