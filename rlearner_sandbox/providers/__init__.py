"""Providers of sandboxes in which the commands of an episode run."""

from __future__ import annotations

from rlearner_sandbox.providers.base import (
    EpisodeSandbox,
    ExecResult,
    Network,
    OnOutput,
    SandboxError,
    SandboxProvider,
    SandboxSpec,
    Stream,
)

__all__ = [
    "EpisodeSandbox",
    "ExecResult",
    "Network",
    "OnOutput",
    "SandboxError",
    "SandboxProvider",
    "SandboxSpec",
    "Stream",
]
