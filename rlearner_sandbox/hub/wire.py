"""What ``sandboxhub`` and the provider ``remote`` send each other, as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, Final

from rlearner_sandbox.providers.base import SandboxSpec

SESSION_HEADER: Final = "X-Sandbox-Session"
# A session that has been silent for so long has ended, and its sandboxes are stopped.
SESSION_S: Final = 60.0
PING_S: Final = 10.0
MAX_REQUEST: Final = 16 << 20
MAX_UPLOAD: Final = 4 << 30
_SPEC_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "image": (str, type(None)),
    "workdir": (str,),
    "env": (dict,),
    "memory_mib": (int,),
    "cpus": (int, float),
    "processes": (int,),
    "disk_mib": (int,),
    "network": (str,),
    "endpoint": (str, type(None)),
    "user": (str, type(None)),
}


def encode_spec(spec: SandboxSpec) -> dict[str, Any]:
    """Return a spec as JSON."""
    return asdict(spec) | {"env": dict(spec.env)}


def decode_spec(content: Any) -> SandboxSpec:
    """Return the spec of a request.

    Raises:
        ValueError: if a field is unknown or has another type.
    """
    if not isinstance(content, dict):
        raise ValueError("spec: an object is needed")
    known = {item.name for item in fields(SandboxSpec)}
    for name, value in content.items():
        if name not in known:
            raise ValueError(f"spec.{name} is not known; {', '.join(sorted(known))} are")
        if not isinstance(value, _SPEC_KINDS[name]) or isinstance(value, bool):
            raise ValueError(f"spec.{name}: {value!r} is not allowed")
    spec = SandboxSpec(**content)
    if spec.network not in ("none", "endpoint", "host"):
        raise ValueError(f"spec.network: {spec.network!r} is not allowed; none, endpoint, host are")
    if min(spec.memory_mib, spec.processes, spec.disk_mib, spec.cpus) <= 0:
        raise ValueError("spec: limits are positive numbers")
    check_variables(spec.env)
    return spec


def check_variables(env: Any) -> dict[str, str]:
    """Return variables of a request; ValueError if they are not texts."""
    if not isinstance(env, Mapping) or not all(
        isinstance(item, str) for pair in env.items() for item in pair
    ):
        raise ValueError("env: names and values are texts")
    return dict(env)


def encode_event(event: dict[str, Any]) -> bytes:
    """Return an event of a running command as a line."""
    return json.dumps(event).encode() + b"\n"


def encode_bytes(data: bytes) -> str:
    """Return bytes as text."""
    return base64.b64encode(data).decode("ascii")


def decode_bytes(text: Any) -> bytes:
    """Return the bytes of a text; ValueError if it is none."""
    if not isinstance(text, str):
        raise ValueError("base64 text is needed")
    return base64.b64decode(text, validate=True)
