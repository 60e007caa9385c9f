"""Every error the project raises on purpose, one tree.

RlearnerError
├── UserError            bad input: one clear line, exit code 2, never a traceback
│   ├── ConfigError      a key, its value, and what is allowed
│   ├── DataError        a file and a line
│   ├── NotInstalled     a package or a program that a setting asks for is not on this machine
│   └── BrokerUnreachable   the broker did not answer before the deadline the user set
├── WireError            bytes that are not a message: unknown field, wrong type, bad length, NaN, over the cap
│   └── TooLarge         a message that was to be sent is over the cap
├── Fenced               a newer incarnation of this process owns the run
├── LostState            the broker remembers less than the learner: names both numbers
├── RequestFailed        a request/reply call that got no usable answer
└── TransferFailed       a weight transfer that broke, timed out or did not match its digest
"""

from __future__ import annotations


class RlearnerError(Exception):
    """Base of the tree."""


class UserError(RlearnerError):
    """An error that the user can fix; ``process.run`` prints the message as one line and exits with code 2."""


class ConfigError(UserError):
    """A configuration key holds something that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not allowed; {allowed}")
        self.key, self.value, self.allowed = key, value, allowed


class DataError(UserError):
    """A row of the user's data is malformed; names file and line."""

    def __init__(self, path: str, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}")
        self.path, self.line, self.problem = path, line, problem


class NotInstalled(UserError):
    """What a setting asks for is not on this machine; says how to get it."""


class BrokerUnreachable(UserError):
    """No broker answered at the address before the deadline."""


class WireError(RlearnerError):
    """Bytes that do not decode to a valid message."""


class TooLarge(WireError):
    """A message that was to be sent is larger than it may be."""


class Fenced(RlearnerError):
    """A newer incarnation took over; this process must stop."""


class LostState(RlearnerError):
    """The broker's stream ends before what the learner knows was issued."""


class RequestFailed(RlearnerError):
    """A request got no usable answer; the asker may retry elsewhere."""


class TransferFailed(RlearnerError):
    """A weight transfer broke, timed out, or did not match its digest or probe."""
