"""Providers of sandboxes in which the commands of an episode run."""

from __future__ import annotations

from rlearner_sandbox.providers.base import (
    ExecResult,
    Network,
    OnOutput,
    Sandbox,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    Stream,
)

__all__ = [
    "ExecResult",
    "Network",
    "OnOutput",
    "Sandbox",
    "SandboxError",
    "SandboxProvider",
    "SandboxSpec",
    "Stream",
]
