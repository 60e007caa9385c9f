"""The OpenAI-compatible HTTP API of a rollout server; off unless ``rollout.http_port`` is set.

Key, tokenizer and port are acquired before the engine loads, which takes minutes, so that their
errors appear at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from broker.contract import wire
from broker.errors import ConfigError, UserError
from broker.nats.addresses import INSECURE
from broker.system import logs
from broker.system.children import spawn
from broker.system.connections import is_loopback
from rlearner_text.openai import api_keys
from rlearner_text.openai.backends import GenerateHandler, ServedModel
from rlearner_text.openai.certificates import server_tls
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.openai.server import bound_socket
from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rlearner_text.tokenizer import Tokenizer
from rlearner_workers.start import start_with_socket
from rollout.config import RolloutSection
from rollout.engines.base import Engine, StreamingEngine
from rollout.http_link import (
    Answered,
    ApiRequest,
    ClientLeft,
    HttpLink,
    LinkMessage,
    Listening,
    Logged,
    Opening,
    ServerState,
    TokenEntry,
    Tokens,
    open_http_link,
)

log = logging.getLogger(__name__)

STATE_S: Final = 0.1  # until the API's process knows a new state without an answer
# pause before the process is started again, twice as long after each start that fails
RESTART_S: Final = 1.0
RESTART_MOST_S: Final = 60.0
CLOSE_WITHIN_S: Final = 5.0  # more than it gives to clients


def served_model(
    engine: Engine, section: RolloutSection, run_model: str, state: Callable[[], str]
) -> ServedModel:
    """Return what the API reports about a server and its engine.

    Args:
        run_model: the model that the run started from.
        state: returns ``serving``, or why the server is not.
    """
    return ServedModel(
        model=section.policy,
        path=section.model_path or run_model,
        max_context_tokens=section.max_context_tokens,
        state=state,
        policy_version=lambda: engine.policy_version,
        top_logprobs=isinstance(engine, StreamingEngine) and engine.tells_top,
    )


class HttpApi:
    """The API of one rollout server, in a process of its own, which is started again if it dies.

    Args:
        opening: what that process must know.
        bound: its socket; connections are refused until ``listen``.
        state: returns the server's state and policy version.
        key_place: where the user finds the API key.
    """

    def __init__(
        self,
        handle: GenerateHandler,
        opening: Opening,
        bound: socket.socket,
        state: Callable[[], tuple[str, int]],
        key_place: str,
    ) -> None:
        self._handle = handle
        self._opening = opening
        self._bound = bound
        self._state = state
        self._key_place = key_place
        self._sent_state: tuple[str, int] | None = None  # the state that the process knows
        self._link: HttpLink | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._tokens: list[TokenEntry] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    async def listen(self) -> None:
        """Start serving.

        Raises:
            UserError: if another process has taken the port.
        """
        with _port_refused(self._bound.getsockname()[1]):
            address = await self._start()
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._tell_state())]
        log.info(
            "OpenAI-compatible API at %s, model %s, API key in %s",
            address,
            self._opening.model,
            self._key_place,
        )

    async def close(self) -> None:
        """Stop serving, with a moment for clients to read answers that are complete; idempotent."""
        self._closing = True
        if self._link is not None:
            self._link.end()
        for task in self._tasks[1:]:
            task.cancel()
        if self._process is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await asyncio.gather(*self._tasks[:1], return_exceptions=True)
        for task in [*self._tasks, *self._answering.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._answering.values(), return_exceptions=True)
        await self._reap()
        self._bound.close()

    async def _start(self) -> str:
        """Start the process and return the API's address.

        Raises:
            OSError: if it cannot listen on its socket.
            UserError: if it ends before it listens.
        """
        self._process, ours = await start_with_socket(self._launch)
        self._link = await open_http_link(ours)
        self._sent_state = None
        self._link.send(self._opening)
        self._say_state()
        while (message := await self._link.receive_or_none()) is not None:
            if isinstance(message, Listening):
                if message.error:
                    raise OSError(0, message.error)
                return message.address
            self._take(message)
        raise UserError(
            "the process of the HTTP API ended before it listened; see its last lines above"
        )

    def _launch(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        fds = theirs.fileno(), self._bound.fileno()
        command = [sys.executable, "-m", "rollout.http_process", *map(str, fds)]
        with os.fdopen(os.dup(2), "wb") as errors:
            # not SIGTERM, which it ignores: a service sends it to all of its processes, and this
            # one drains first
            return spawn(command, errors, pass_fds=fds, death_signal=signal.SIGKILL)

    async def _keep(self) -> None:
        """Take what the process sends, and start it again whenever it has ended."""
        pause_s = RESTART_S
        while True:
            while (
                self._link is not None
                and (message := await self._link.receive_or_none()) is not None
            ):
                self._take(message)
            for task in self._answering.values():
                task.cancel()
            if self._closing:
                return
            log.error("the process of the HTTP API ended; starting it again")
            await self._reap()
            await asyncio.sleep(pause_s)
            if self._closing:
                return
            try:
                await self._start()
                pause_s = RESTART_S
            except (OSError, UserError) as error:
                pause_s = min(2 * pause_s, RESTART_MOST_S)
                log.error("the HTTP API does not start: %s", getattr(error, "strerror", error))

    async def _reap(self) -> None:
        link = self._link
        process = self._process
        self._link = None
        self._process = None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.wait)

    async def _tell_state(self) -> None:
        while True:
            self._say_state()
            await asyncio.sleep(STATE_S)

    def _say_state(self) -> None:
        state = self._state()
        if state != self._sent_state and self._link is not None:
            self._sent_state = state
            self._link.send(ServerState(*state))

    def _take(self, message: LinkMessage) -> None:
        match message:
            case ApiRequest(number, request, top):
                task = self._answering[number] = asyncio.create_task(
                    self._answer(number, request, top)
                )
                task.add_done_callback(lambda _: self._answering.pop(number, None))
            case ClientLeft(number):
                if (answer := self._answering.get(number)) is not None:
                    answer.cancel()
            case Logged(logger, level, text, traceback):
                extra = {logs.TRACEBACK: traceback} if traceback else None
                logging.getLogger(logger).log(level, "%s", text, extra=extra)

    async def _answer(self, number: int, request: wire.GenerateRequest, top: int | None) -> None:
        link = self._link
        reply = None

        def told(event: TokenEvent) -> None:
            if not self._tokens:
                # with those of all requests in this pass
                asyncio.get_running_loop().call_soon(self._send_tokens)
            self._tokens.append((number, event.token_ids, event.logprobs, event.version, event.top))

        try:
            reply = await self._handle(request, None if top is None else TokenListener(told, top))
        except Exception:
            log.exception("request %s failed", request.request_id)
        self._send_tokens()  # before their answer
        if link is not None and link is self._link:
            self._say_state()
            link.send(Answered(number, reply))

    def _send_tokens(self) -> None:
        if self._tokens:
            entries = self._tokens
            self._tokens = []
            if self._link is not None:
                self._link.send(Tokens(entries))


async def prepare_http(
    handle: GenerateHandler,
    served: ServedModel,
    section: RolloutSection,
    *,
    bind: str,
    port: int,
    trust_remote_code: bool,
    chat_template: str | None = None,
) -> HttpApi:
    """Prepare the API without serving, so that its errors appear before the engine loads.

    Raises:
        UserError: if the port or the key is not available, the certificate cannot be used, other
            hosts could read what is sent, or the model has no tokenizer.
    """
    _check_tls(section, bind)
    key, key_place = api_keys.find_key()
    KeyStore().read()  # checked now, and again with each change
    await asyncio.to_thread(
        Tokenizer.load,
        served.path,
        trust_remote_code=trust_remote_code,
        chat_template=chat_template,
    )
    with _port_refused(port):
        bound = bound_socket(bind, port)
    opening = Opening(
        key=key,
        model=served.model,
        path=served.path,
        max_context_tokens=served.max_context_tokens,
        top_logprobs=served.top_logprobs,
        trust_remote_code=trust_remote_code,
        log_level=logging.getLogger().level,
        chat_template=chat_template,
        cert=section.http_tls_cert,
        cert_key=section.http_tls_key,
    )
    return HttpApi(
        handle, opening, bound, lambda: (served.state(), served.policy_version()), key_place
    )


def _check_tls(section: RolloutSection, bind: str) -> None:
    if section.http_tls_cert is not None and section.http_tls_key is not None:
        names = {"cert_name": "rollout.http_tls_cert", "key_name": "rollout.http_tls_key"}
        server_tls(section.http_tls_cert, section.http_tls_key, **names)
    elif not is_loopback(bind) and not os.environ.get(INSECURE):
        allowed = "an address of loopback without TLS, because others could read keys and prompts; add --tls-cert and "
        raise ConfigError(
            "rollout.http_bind",
            bind,
            allowed + "--tls-key, or --insecure on a network that you trust",
        )


@contextmanager
def _port_refused(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        allowed = f"the port is not available ({error.strerror}); choose another, or 0 for any"
        raise ConfigError("rollout.http_port", port, allowed) from None
