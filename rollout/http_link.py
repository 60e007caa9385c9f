"""Messages between a rollout server and the process of its HTTP API, over a socket that only these
two have.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec.msgpack import Decoder

from broker.contract import wire
from rlearner_text.openai.token_events import TopLogprobs
from rlearner_workers.link import MessageLink

# request number, token ids, logprobs, policy version, likeliest tokens at each position: the fields
# of a TokenEvent
TokenEntry = tuple[int, Sequence[int], Sequence[float], int, Sequence[TopLogprobs]]


class _LinkMessage(msgspec.Struct, frozen=True, tag=True):
    pass


class Opening(_LinkMessage, frozen=True):
    """The first message to the API's process."""

    key: str
    model: str
    path: str  # of the tokenizer
    max_context_tokens: int
    top_logprobs: bool
    trust_remote_code: bool
    log_level: int
    chat_template: str | None = None  # plain or the text of a template; None: the model's own
    cert: str | None = None
    cert_key: str | None = None


class ServerState(_LinkMessage, frozen=True):
    """What ``ServedModel.state`` and ``ServedModel.policy_version`` return from now on."""

    state: str
    policy_version: int


class Tokens(_LinkMessage, frozen=True):
    """Everything that was sampled for streams in one pass."""

    entries: list[TokenEntry]


class Answered(_LinkMessage, frozen=True):
    """A request's answer; None: the engine raised an exception."""

    number: int
    reply: wire.GenerateReply | None


class Listening(_LinkMessage, frozen=True):
    """The API is available at this address; or not, because of ``error``."""

    address: str
    error: str = ""


class ApiRequest(_LinkMessage, frozen=True):
    """A request; ``top_logprobs``: stream its tokens, each with this many of the likeliest."""

    number: int
    request: wire.GenerateRequest
    top_logprobs: int | None


class ClientLeft(_LinkMessage, frozen=True):
    """The client of a request has disconnected."""

    number: int


class Logged(_LinkMessage, frozen=True):
    """A log record of the API's process, for the server's own log."""

    logger: str
    level: int
    text: str
    traceback: str = ""


LinkMessage = (
    Opening | ServerState | Tokens | Answered | Listening | ApiRequest | ClientLeft | Logged
)

_MESSAGES: Final[Decoder[LinkMessage]] = Decoder(LinkMessage)

HttpLink = MessageLink[LinkMessage]


async def open_http_link(end: socket.socket) -> HttpLink:
    """Return the link over this end. Nothing waits for the other end: what is unsent is at most all
    open answers.
    """
    return await MessageLink.open(end, _MESSAGES)
