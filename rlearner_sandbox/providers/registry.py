"""The providers by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from rlearner_sandbox.providers.base import SandboxProvider

PROVIDERS: Final[dict[str, str]] = {
    "namespace": "rlearner_sandbox.providers.namespace.provider:NamespaceProvider",
    "podman": "rlearner_sandbox.providers.containers:PodmanProvider",
    "docker": "rlearner_sandbox.providers.containers:DockerProvider",
    "remote": "rlearner_sandbox.providers.remote:RemoteProvider",
}


def make_provider(name: str, arguments: Mapping[str, Any] | None = None) -> SandboxProvider:
    """Return a new provider.

    Raises:
        ValueError: if there is none of that name, or it does not take an argument.
    """
    if name not in PROVIDERS:
        raise ValueError(f"provider: {name!r} is not allowed; one of {', '.join(PROVIDERS)} is")
    module, _, attribute = PROVIDERS[name].partition(":")
    make: Any = getattr(import_module(module), attribute)
    try:
        provider: SandboxProvider = make(**dict(arguments or {}))
    except TypeError as error:
        raise ValueError(f"provider {name}: {error}") from None
    return provider
