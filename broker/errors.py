"""The project's exceptions.

RlearnerError
├── UserError            bad input: one line, exit code 2, no traceback
│   ├── ConfigError      a key, its value, and what is allowed
│   ├── DataError        a file and a line
│   ├── NotInstalled     a required package or program is not installed
│   ├── NotFinite        weights, or what a model computes, hold NaN or infinity
│   └── BrokerUnreachable   the broker did not answer before the deadline
├── WireError            not a valid message: unknown field, wrong type, bad length, NaN, too large
│   └── TooLarge         a message to be sent exceeds the limit
├── Fenced               a newer incarnation of this process owns the run
├── StartAgain           one line, exit code 1: a supervisor starts the process again
│   ├── NodesMissing     not all nodes of a learner came in time
│   └── ServerDied       the private nats-server ended by itself
├── LostState            the broker has less than the learner stored
├── StoreFull            the broker has no room for a message that need not be stored
├── RequestFailed        a request got no usable reply
│   └── RequestInvalid   the request or its reply breaks the contract: asking again does not help
└── TransferFailed       a weight transfer broke, timed out or did not match its digest
    └── OfferRefused     its bytes are right, but the engine cannot serve them
"""

from __future__ import annotations


def reason_of(error: BaseException) -> str:
    """Return the text of an error in one line, its type if it has none, as a ``TimeoutError`` of
    asyncio.
    """
    return " ".join(str(error).split()) or type(error).__name__


def described(error: BaseException) -> str:
    """Return the type of an error, and its text in one line if it has one."""
    name = type(error).__name__
    reason = reason_of(error)
    return name if reason == name else f"{name}: {reason}"


class RlearnerError(Exception):
    """Base class of the project's exceptions."""


class UserError(RlearnerError):
    """An error that the user can fix; ``process.run`` prints the message as one line and exits with
    code 2.
    """


class ConfigError(UserError):
    """A configuration key has a value that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class DataError(UserError):
    """A row of the user's data is malformed; names file and line."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path = path
        self.line = line
        self.problem = problem


class NotInstalled(UserError):
    """A package or program that a setting requires is not installed; the message says how to get
    it.
    """


class NotFinite(UserError):
    """Weights, or what a model computes with them, hold NaN or infinity; training on cannot help."""


class BrokerUnreachable(UserError):
    """No broker answered at the address before the deadline."""


class WireError(RlearnerError):
    """Bytes that do not decode to a valid message."""


class TooLarge(WireError):
    """A message to be sent exceeds the size limit."""


class StoreFull(RlearnerError):
    """The broker has no room for a message that is not worth waiting for."""


class Fenced(RlearnerError):
    """A newer incarnation took over; this process must stop."""


class StartAgain(RlearnerError):
    """What another start may cure: ``process.main`` prints one line and exits with 1."""


class NodesMissing(StartAgain):
    """Not all nodes of a learner came in time."""


class ServerDied(StartAgain):
    """The private nats-server ended by itself."""


class LostState(RlearnerError):
    """The broker's stream ends before records that the learner knows were stored."""


class RequestFailed(RlearnerError):
    """A request got no usable reply; the requester may retry elsewhere."""


class RequestInvalid(RequestFailed):
    """The request or its reply breaks the contract, or is too large; asking again does not help."""


class TransferFailed(RlearnerError):
    """A weight transfer broke, timed out, or did not match its digest or probe."""


class OfferRefused(TransferFailed):
    """The offered bytes are right, but their names, shapes or logprobs are not those of the
    engine's model.
    """
