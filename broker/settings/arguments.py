"""Types and helpers for argparse, with one-line error messages."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn

from broker.contract.streams import check_token
from broker.errors import ConfigError, UserError
from broker.nats.addresses import DEFAULT_BROKER, INSECURE, without_passwords
from broker.system.entry import EXIT_USER_ERROR

WIDTH: Final = 100  # of descriptions in help texts
Arguments = argparse._ActionsContainer  # a parser, or a group of its arguments


class ArgumentParser(argparse.ArgumentParser):
    """A parser that reports a bad command line in one line, as do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with code 2."""
        self.exit(
            EXIT_USER_ERROR,
            f"error: {self.prog}: {' '.join(message.split())}; see {self.prog} --help\n",
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Name the commands in a line that begins with the one that was probably meant."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            close = difflib.get_close_matches(str(value), action.choices, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise argparse.ArgumentError(
                None, f"no command {value!r}; {hint}known: {', '.join(action.choices)}"
            )
        super()._check_value(action, value)


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    return _whole_number(text, 1)


def natural(text: str) -> int:
    """Parse a whole number of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; a whole number of at least {least}"
        )
    return int(text)


def port(text: str) -> int:
    """Parse a TCP port; 0 is any free one."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use 0 to 65535")
    return int(text)


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = _parse_number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number above 0")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = _parse_number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; a number from 0 to 1")
    return value


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def tokens(text: str) -> list[str]:
    """Parse names separated by commas that can be parts of subjects, such as domains and pools."""
    for name in (valid_names := names(text)):
        try:
            check_token(name, "name")
        except ConfigError as error:
            raise argparse.ArgumentTypeError(f"{name!r} is not allowed; {error.allowed}") from None
    return valid_names


def add_config(
    parser: argparse.ArgumentParser,
    *,
    file: str = "quickstart",
    setting: str = "train.steps=50",
    needed: bool = True,
) -> None:
    """Add the arguments CONFIG and any number of key=value."""
    condition = "" if needed else "; without one, only the machine is checked"
    text = f"YAML file, the name of one of the package ({file}), or a run's folder{condition}"
    parser.add_argument("config", metavar="CONFIG", nargs=None if needed else "?", help=text)
    text = f"settings that override the file, for example {setting}"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=text)


def add_json(parser: Arguments, text: str = "print one JSON object") -> None:
    """Add --json, which every command has that prints a result."""
    parser.add_argument("--json", action="store_true", help=text)


def complete(
    parser: argparse.ArgumentParser, examples: Mapping[str, Sequence[str]]
) -> argparse.ArgumentParser:
    """Add --version, shell completion, and examples to the help of each command; return the parser.

    Args:
        examples: shell lines by command (``broker dead show``).
    """
    parser.add_argument("--version", action=VersionAction, help="print the version and exit")
    for command in commands_of(parser):
        if lines := examples.get(command.prog):
            title = "example" if len(lines) == 1 else "examples"
            prefix = f"{command.epilog}\n\n" if command.epilog else ""
            command.epilog = prefix + "\n".join([f"{title}:", *(f"  {line}" for line in lines)])
            command.description = textwrap.fill(command.description or "", WIDTH)
            command.formatter_class = argparse.RawDescriptionHelpFormatter
    # A shell requests completions.
    if "_ARGCOMPLETE" in os.environ:
        from broker.settings.completion import offer

        offer(parser, commands_of(parser))
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its commands, at every depth."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from commands_of(inner)


class VersionAction(argparse.Action):
    """Prints the version of the installed package and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(
            option_strings,
            argparse.SUPPRESS,
            nargs=0,
            default=argparse.SUPPRESS,
            help=kwargs.get("help"),
        )

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('rlearner')}")
        parser.exit()


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class _Address(argparse.Action):
    """Stores an address from the command line, which all users of the machine can read."""

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        if "@" in value:
            allowed = (
                "an address without a login, because other users can see it here; put the "
                "address into RL_BROKER"
            )
            raise UserError(f"--broker {without_passwords(value)}: {allowed}")
        setattr(options, self.dest, value)


class _SetInsecure(argparse.Action):
    """Sets the variable, which processes that this one starts inherit."""

    def __call__(self, *_: Any) -> None:
        os.environ[INSECURE] = "1"


def add_broker(
    parser: argparse.ArgumentParser, *, text: str = "address of the broker", is_noted: bool = False
) -> None:
    """Add --broker (RL_BROKER) and --insecure (RL_INSECURE).

    Args:
        is_noted: whether the run's folder names its broker, so that the default is None, see
            ``broker_address``.
    """
    url = os.environ.get("RL_BROKER") or DEFAULT_BROKER
    visible_url = without_passwords(url).replace("%", "%%")
    default: str | None = url
    source = "RL_BROKER"
    if is_noted:
        default = None
        source = "that of the run's folder, else RL_BROKER"
    help_text = f"{text} ({source}, {visible_url})"
    parser.add_argument("--broker", metavar="URL", action=_Address, default=default, help=help_text)
    help_text = f"connect to a broker on another host without TLS or without a login ({INSECURE}=1)"
    parser.add_argument(
        "--insecure", action=_SetInsecure, nargs=0, default=argparse.SUPPRESS, help=help_text
    )


def broker_words(url: str) -> list[str]:
    """Return the words that name a broker to another command; none if RL_BROKER has a login."""
    return [] if "@" in url else ["--broker", url]
