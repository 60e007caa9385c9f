"""The base class of tool sources: what lists tools and runs them, outside the hub's process.

A source is opened for one episode, or shared by the episodes of a hub, and called by one episode at
a time unless it is shared. A tool's own errors are results that the policy reads. Anything else,
such as a server that died, is ``SourceFailed``: the policy is not to blame until
``on_failure: observe`` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal
from urllib.parse import urlsplit

import msgspec
from pydantic import AfterValidator

from broker.errors import RlearnerError
from broker.settings.config import EndpointMark, Section

OnFailure = Literal["fail", "observe"]
# of one message of a server, and of one HTTP answer
MAX_MESSAGE_BYTES: Final = 8 << 20
# for a source to end by itself
FAREWELL_S: Final = 1.0


def _check_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("expected http://host:port/… or https://…, without a user")
    return value


# of a server that gets the calls
ServerUrl = Annotated[str, AfterValidator(_check_url), EndpointMark()]


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool that a source offers.

    Attributes:
        parameters: JSON Schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]


class ToolResult(msgspec.Struct, frozen=True):
    """What a call returned; with ``is_error``, why it did not."""

    text: str
    is_error: bool = False


class SourceFailed(RlearnerError):
    """A source that cannot be started, died, hangs, or breaks its protocol; one line."""


class SlowTool(RlearnerError):
    """A tool did not return in time, and its source works otherwise."""


class ToolSource:
    """One instance: a process, a connection, or an address.

    Attributes:
        Args: pydantic model of ``tools.<name>.args``.
        on_failure: what its failure means, where ``tools.<name>.on_failure`` is null.
    """

    Args: ClassVar[type[Section]] = Section
    on_failure: ClassVar[OnFailure] = "fail"

    def __init__(self, name: str, args: Any) -> None:
        """Keep the source's name in the configuration, and its arguments."""
        self.name = name
        self.args = args

    @classmethod
    def check(cls, args: Any) -> None:
        """Refuse arguments that name something missing; starts nothing.

        Raises:
            ConfigError: with the argument's name as key.
            NotInstalled: if a package is missing.
        """

    @classmethod
    def data_files(cls, args: Any) -> list[str]:
        """Return the files whose content must be the same for every hub of a run."""
        return []

    async def open(self) -> Sequence[ToolSpec]:
        """Start it, once, and return its tools.

        Raises:
            SourceFailed: if it does not start, or lists no valid tools.
            UserError: if a secret is missing.
        """
        raise NotImplementedError

    async def call(self, tool: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Run a tool.

        Raises:
            SourceFailed: if the source died, hangs, or lists other tools than before.
            SlowTool: if it did not return in time.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End it, with all that it started; may be called at any time, also twice."""


def cut(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of a result, with a mark where it was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n(cut: the result has {len(text)} characters)"
