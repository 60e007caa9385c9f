"""Finds the code that a configuration names, which a host loads only for an owner that it trusts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

SECTIONS: Final = ("domains", "model", "rollout", "envhub", "rewardhub")  # those that hubs and servers use
COMMANDS: Final = (
    "command",
    "trust_remote_code",
    "extra",
)  # settings that run code; extra: fields of vLLM's EngineArgs
_REFERENCE: Final = re.compile(r"(?:.*\.py|[A-Za-z_][\w.]*):(?!\d+$)[\w.-]+", re.DOTALL)


def named_code(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of all settings that name a file, a module, a command or remote code.

    Names of built-in plug-ins and of entry points of installed packages are no code of the run.
    """
    return [key for name in SECTIONS for key in _search(name, config.get(name))]


def _search(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            if name in COMMANDS and each:
                yield f"{key}.{name}"
            else:
                yield from _search(f"{key}.{name}", each)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _search(f"{key}.{number}", each)
    elif isinstance(value, str) and _REFERENCE.fullmatch(value):
        yield key
