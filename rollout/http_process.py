"""The process of a rollout server's HTTP API.

It has an interpreter of its own, because HTTP, JSON, tokenizer and templates would take the
engine's from it: a chunk takes longer to write than a token to sample. It ends when the server
closes the link or exits.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import signal
import socket
import sys
from typing import Final

import uvloop

from broker.contract import wire
from rlearner_text.openai.backends import ServedModel
from rlearner_text.openai.certificates import server_tls
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.openai.server import HttpServer
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.tokenizer import Tokenizer
from rollout.http_link import (
    Answered,
    ApiRequest,
    ClientLeft,
    HttpLink,
    Listening,
    Logged,
    Opening,
    ServerState,
    Tokens,
    open_http_link,
)

# objects made and not freed, as in the other processes: streams have few cycles
GARBAGE_AFTER: Final = 50_000


class HttpProcess:
    """The HTTP server, whose requests the rollout server at the other end of the link answers."""

    def __init__(self, link: HttpLink) -> None:
        self._link = link
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[wire.GenerateReply]] = {}
        self._taps: dict[int, TokenListener] = {}
        self._state = "starting"
        self._version = -1

    async def serve(self, listening: socket.socket) -> None:
        """Serve on a bound socket until the link is closed."""
        opening = await self._link.receive_or_none()
        if not isinstance(opening, Opening):
            return
        logging.basicConfig(level=opening.log_level, handlers=[_LinkHandler(self._link)])
        server = self._open(opening)
        server.take_socket(listening)
        try:
            await server.listen()
        except OSError as error:
            self._link.send(Listening("", error.strerror or type(error).__name__))
        else:
            self._link.send(Listening(server.address))
            await self._follow()
        await server.close()
        self._link.close()

    def _open(self, opening: Opening) -> HttpServer:
        model = ServedModel(
            model=opening.model,
            path=opening.path,
            max_context_tokens=opening.max_context_tokens,
            state=lambda: self._state,
            policy_version=lambda: self._version,
            top_logprobs=opening.top_logprobs,
        )
        trusted = opening.trust_remote_code
        template = opening.chat_template
        tokenizer = Tokenizer.load(opening.path, trust_remote_code=trusted, chat_template=template)
        tls = None
        if opening.cert is not None and opening.cert_key is not None:
            tls = server_tls(
                opening.cert, opening.cert_key, cert_name="certificate", key_name="key"
            )
        return HttpServer.with_key(
            self._handle, tokenizer, model, key=opening.key, tls=tls, key_store=KeyStore()
        )

    async def _follow(self) -> None:
        while (message := await self._link.receive_or_none()) is not None:
            match message:
                case Tokens(entries):
                    for number, token_ids, logprobs, version, top in entries:
                        if (tap := self._taps.get(number)) is not None:
                            tap.on_tokens(TokenEvent(token_ids, logprobs, version, top))
                case Answered(number, reply):
                    answer = self._answers.get(number)
                    if answer is None or answer.done():
                        continue  # its client has disconnected
                    if reply is None:
                        answer.set_exception(RuntimeError("the engine raised an exception"))
                    else:
                        answer.set_result(reply)
                case ServerState(state, version):
                    self._state = state
                    self._version = version

    async def _handle(
        self, request: wire.GenerateRequest, tap: TokenListener | None = None, /
    ) -> wire.GenerateReply:
        number = next(self._numbers)
        answer: asyncio.Future[wire.GenerateReply] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if tap is not None:
            self._taps[number] = tap
        try:
            self._link.send(ApiRequest(number, request, None if tap is None else tap.top_logprobs))
            return await answer
        finally:
            del self._answers[number]
            self._taps.pop(number, None)
            if answer.cancelled():
                self._link.send(ClientLeft(number))


class _LinkHandler(logging.Handler):
    """Sends log records to the server, which has the log files."""

    def __init__(self, link: HttpLink) -> None:
        super().__init__()
        self._link, self._lines = link, logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        trace = (
            self._lines.formatException(record.exc_info)
            if record.exc_info and record.exc_info[0]
            else ""
        )
        self._link.send(Logged(record.name, record.levelno, record.getMessage(), trace))


async def _main(link: int, listening: int) -> None:
    process = HttpProcess(await open_http_link(socket.socket(fileno=link)))
    await process.serve(socket.socket(fileno=listening))


if __name__ == "__main__":
    # sent to all processes of a service; the server drains first
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.set_threshold(GARBAGE_AFTER, 10, 10)
    uvloop.run(_main(int(sys.argv[1]), int(sys.argv[2])))
