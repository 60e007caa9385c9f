"""Makes a provider of sandboxes by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from broker.errors import ConfigError, UserError
from broker.settings.registry import resolve
from envhub.tasks.settings import TaskArgs
from rlearner_sandbox.providers.base import SandboxProvider
from rlearner_sandbox.providers.pool import SandboxPool
from rlearner_sandbox.providers.registry import PROVIDERS


def load_provider(args: TaskArgs) -> SandboxProvider:
    """Return a new provider behind a pool, which stops asking it while it fails.

    Raises:
        ConfigError: if there is none of that name, or it does not take an argument.
        UserError: if it does not work on this host.
    """
    make: Any = resolve("sandbox_providers", args.provider, PROVIDERS)
    arguments = dict(args.provider_args)
    if isinstance(arguments.get("folder"), str):
        arguments["folder"] = Path(arguments["folder"])
    try:
        provider: SandboxProvider = make(**arguments)
    except TypeError as error:
        raise ConfigError("provider_args", args.provider_args, str(error)) from None
    except (OSError, ValueError) as error:
        raise UserError(f"provider {args.provider}: {error}") from None
    return SandboxPool(provider, warm=args.warm)


def check_provider(args: TaskArgs) -> None:
    """Check that there is a provider of that name.

    Raises:
        ConfigError: if there is not.
    """
    try:
        resolve("sandbox_providers", args.provider, PROVIDERS)
    except ConfigError as error:
        raise ConfigError("provider", args.provider, error.allowed) from None
