"""What this host allows runs of other owners: secrets by destination, folders of data.

Options, and the file ``~/.config/rlearner/host.toml`` with the same names:

    allow-secret = ["JUDGE_KEY=judge.example.com", "/run/secrets/judge=10.0.0.7"]
    allow-data = ["/data/rl"]
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

from broker.errors import UserError

# How child processes of a joined process get its rules.
VARIABLE: Final = "RL_HOST_RULES"
OPENAI_KEY: Final = "OPENAI_API_KEY"
OPENAI_HOST: Final = "api.openai.com"
# Any destination, code of the run included.
ANY_HOST: Final = "*"
_KEYS: Final = ("allow-secret", "allow-data")


@dataclass(frozen=True)
class HostRules:
    """Rules of a host.

    Attributes:
        secrets: name of a variable or path of a file -> hosts that may get what it holds.
        folders: absolute, without links.
    """

    secrets: Mapping[str, frozenset[str]] = field(default_factory=dict)
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, allowed_secrets: Iterable[str], allowed_folders: Iterable[str]) -> Self:
        """Return the rules in texts such as ``NAME=HOST`` and ``/data``.

        Raises:
            ValueError: if one is malformed.
        """
        secrets: dict[str, frozenset[str]] = {}
        for text in allowed_secrets:
            name, host = parse_secret(text)
            secrets[name] = secrets.get(name, frozenset()) | {host}
        return cls(secrets, tuple(os.path.realpath(parse_folder(text)) for text in allowed_folders))

    def allow_secret(self, name: str, url: str) -> bool:
        """Return whether the secret may go to a URL's host; without a URL, to code of the run."""
        hosts = self.secrets.get(name, frozenset())
        host, is_private = _parse_destination(url)
        if ANY_HOST in hosts or (host and host in hosts):
            return True
        return name == OPENAI_KEY and (
            is_private or (url.startswith("https://") and host == OPENAI_HOST)
        )

    def allow_requests(self, url: str) -> bool:
        """Return whether a run may let this host send requests to the host of a URL."""
        host, _ = _parse_destination(url)
        allowed_hosts = {host for hosts in self.secrets.values() for host in hosts} - {ANY_HOST}
        return bool(host) and (
            host in allowed_hosts or (url.startswith("https://") and host == OPENAI_HOST)
        )

    def allow_data(self, path: str) -> bool:
        """Return whether a file or folder is below one of the host's folders, links resolved."""
        real = Path(os.path.realpath(os.path.expanduser(path)))
        return any(real.is_relative_to(folder) for folder in self.folders)

    def enforce(self) -> None:
        """Let this process and its children resolve only secrets that the rules allow."""
        secrets = {name: sorted(hosts) for name, hosts in self.secrets.items()}
        os.environ[VARIABLE] = json.dumps({"secrets": secrets})


def enforced_rules() -> HostRules | None:
    """Return the rules of this process; None without a join token: nothing is restricted."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        secrets = json.loads(text)["secrets"]
        return HostRules({str(name): frozenset(map(str, hosts)) for name, hosts in secrets.items()})
    except (ValueError, TypeError, KeyError, AttributeError):
        return HostRules()


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Add --allow-secret and --allow-data."""
    text = (
        "with --join: the run may send this variable or file to HOST (* for any use); may be "
        "repeated"
    )
    parser.add_argument(
        "--allow-secret",
        action="append",
        default=[],
        type=_argument_type(parse_secret),
        metavar="NAME=HOST",
        help=text,
    )
    text = "with --join: the run may name data files below this folder; may be repeated"
    parser.add_argument(
        "--allow-data",
        action="append",
        default=[],
        type=_argument_type(parse_folder),
        metavar="FOLDER",
        help=text,
    )


def host_rules(options: argparse.Namespace) -> HostRules:
    """Return the rules of the options and of the host's file.

    Raises:
        UserError: if the file could be written by others, or is malformed.
    """
    rules = _file_rules()
    secrets = [*rules["allow-secret"], *getattr(options, "allow_secret", ())]
    return HostRules.of(secrets, [*rules["allow-data"], *getattr(options, "allow_data", ())])


def rules_file() -> Path:
    """Return the path of the host's file."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (
        (Path(base) if base.startswith("/") else Path.home() / ".config") / "rlearner" / "host.toml"
    )


def parse_secret(text: str) -> tuple[str, str]:
    """Return name and host of ``NAME=HOST``.

    Raises:
        ValueError: if it is not that.
    """
    name, _, host = text.rpartition("=")
    name = name.strip()
    host = host.strip().lower().strip("[]")
    if not name or not host or "/" in host or " " in host:
        raise ValueError(
            f"{text!r} is not allowed; NAME=HOST, for example JUDGE_KEY=judge.example.com"
        )
    return (os.path.abspath(os.path.expanduser(name)) if "/" in name else name), host


def parse_folder(text: str) -> str:
    """Return an absolute folder.

    Raises:
        ValueError: if it is none, or all of the file system.
    """
    path = os.path.expanduser(text)
    if not os.path.isabs(path) or os.path.realpath(path) == "/":
        raise ValueError(f"{text!r} is not allowed; an absolute folder, for example /data")
    return path


def _argument_type(parse: Callable[[str], object]) -> Callable[[str], str]:
    def check(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


def _file_rules() -> dict[str, list[str]]:
    import tomllib

    path = rules_file()
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & (
                stat.S_IWGRP | stat.S_IWOTH
            ):
                raise UserError(f"{path} could be written by other users; run chmod go-w {path}")
            rules = tomllib.load(file)
    except FileNotFoundError:
        return {name: [] for name in _KEYS}
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    for name, texts in rules.items():
        parse = {"allow-secret": parse_secret, "allow-data": parse_folder}.get(name)
        if parse is None:
            raise UserError(f"{path}: {name} is not allowed; known: {', '.join(_KEYS)}")
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{path}: {name} must be a list of texts")
        try:
            for text in texts:
                parse(text)
        except ValueError as error:
            raise UserError(f"{path}: {name}: {error}") from None
    return {name: rules.get(name, []) for name in _KEYS}


def _parse_destination(url: str) -> tuple[str, bool]:
    """Return the host of a URL, empty if it has none, and whether that is this machine."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
    except ValueError:
        return "", False
    if parts.username is not None or not url.isprintable() or set(url) & set("\\ "):
        # Libraries disagree about the host of such a text.
        return "", False
    try:
        return host, host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host, False
