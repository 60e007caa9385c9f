"""Removes secrets from text for logs and terminals, and tells which names belong to secrets.

A secret is recognized by its format (a key of nkeys, OpenAI, Hugging Face, ...), by the name in
front of it (``api_key=...``), as a login in a URL, or because it is the value of an environment
variable with such a name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Final

HIDDEN: Final = "***"
# Shorter values of variables occur in ordinary words.
MIN_VALUE_CHARS: Final = 8

_NAMES: Final = (
    r"(?:[a-z0-9_-]*[_-])?"
    r"(?:api_?key|password|passwd|passphrase|secret|secret_?key|private_?key|access_?key(?:_id)?"
    r"|(?:access|api|auth|bearer|refresh|session|hf|hub|github|gh)_?token|credentials?)"
)
_NAME: Final = re.compile(rf"(?i:{_NAMES}|token)\Z")
_VARIABLE: Final = re.compile(rf"(?i:{_NAMES}|(?:[a-z0-9_]*_)?(?:token|key|pass|pwd))\Z")
# values with a format of their own
_FORMATS: Final = re.compile(
    r"\bS[AUOCNX][A-Z2-7]{56}\b"  # nkeys
    r"|\b(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}"  # OpenAI, Anthropic and others
    r"|\b(?:hf|api_org)_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|\bgh[oprsu]_[A-Za-z0-9]{36,}|\bgithub_pat_\w{22,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
    r"|\bxox[abprs]-[A-Za-z0-9-]{10,}"  # Slack
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}"  # JWT
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----END)[\s\S]){0,8192}"
    r"(?:-----END [A-Z ]*PRIVATE KEY-----)?"
)
_LOGIN: Final = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^\s/@'\"]{1,512}@")
_ASSIGNMENTS: Final = re.compile(
    rf"(?i)(\b{_NAMES}[\"']?\s{{0,2}}=\s{{0,2}}[\"']?)(?!\*\*\*)[^\s\"',;&)}}\]]+"  # api_key=value
    # "api_key": "value"
    rf"|(\b(?:{_NAMES}|token)[\"']?\s{{0,2}}:\s{{0,2}}[\"'])(?!\*\*\*)[^\"'\n]+"
    r"|(\bauthorization[\"']?\s{0,2}[:=]\s{0,2}[\"']?(?:bearer|basic|token)\s)[^\s\"',]+"
    r"|(\bbearer\s)[A-Za-z0-9._~+/=-]{16,}"
)


def is_secret_name(name: str) -> bool:
    """Return whether a name is that of a secret, such as ``api_key`` or ``HF_TOKEN``."""
    return _NAME.match(name) is not None


def redact(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the text with ``***`` for every secret that is recognized."""
    values = {value.strip() for name, value in environ.items() if _holds_secret(name, value)}
    # One may be part of another.
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _FORMATS.sub(HIDDEN, text)
    text = _LOGIN.sub(rf"\1{HIDDEN}@", text)
    return _ASSIGNMENTS.sub(lambda match: f"{next(filter(None, match.groups()))}{HIDDEN}", text)


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that hold no secret."""
    return {
        name: value
        for name, value in environ.items()
        if not _VARIABLE.match(name) and not _LOGIN.search(value)
    }


def why_secret(key: str, value: str) -> str:
    """Return why the value of a setting must not stand in a configuration, empty if it may."""
    if value and is_secret_name(key):
        return "it is a secret by its name"
    if _FORMATS.search(value):
        return "it has the format of a secret"
    return "it is an address with a login" if _LOGIN.search(value) else ""


def _holds_secret(name: str, value: str) -> bool:
    long_enough = len(value.strip()) >= MIN_VALUE_CHARS
    # paths
    return (
        long_enough
        and _VARIABLE.match(name) is not None
        and not value.startswith(("/", "./", "~/"))
    )
