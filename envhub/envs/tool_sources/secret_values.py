"""Plain values and references to secrets, for headers and environment variables of a source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from broker.settings.secret import SecretRef
from broker.system.fault import clean
from broker.system.redaction import HIDDEN, redact

Values = dict[str, str | SecretRef]


def find_values(values: Mapping[str, str | SecretRef], key: str, url: str = "") -> dict[str, str]:
    """Return the values with every secret in its place.

    Args:
        key: of the setting, for messages.
        url: where they are sent; empty: to a process on this host.

    Raises:
        UserError: if a secret is missing or not usable.
    """
    return {
        name: value if isinstance(value, str) else value.require(f"{key}.{name}", url)
        for name, value in values.items()
    }


def secrets_of(values: Mapping[str, str | SecretRef], found: Mapping[str, str]) -> list[str]:
    """Return the values that references led to."""
    return [found[name] for name, value in values.items() if not isinstance(value, str)]


def hide(text: str, secrets: Iterable[str]) -> str:
    """Return one line of a server's text without the secrets that it was given."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return clean(redact(text))
