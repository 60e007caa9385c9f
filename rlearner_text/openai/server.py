"""HTTP server of the API: authentication, routing and errors; backends answer the requests."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from broker.contract import wire
from rlearner_text.anthropic.errors import error_body, speaks_anthropic
from rlearner_text.anthropic.routes import AnthropicRoutes, describe_model
from rlearner_text.openai.backends import GenerateHandler, ServedModel
from rlearner_text.openai.callers import Call, Caller, CallerDirectory
from rlearner_text.openai.connections import (
    Connections,
    LimitedHandler,
    Limits,
    arrived,
    backend_of,
    call_of,
    set_call,
)
from rlearner_text.openai.generation import FAILED, unknown_model
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.openai.routes import OpenAIRoutes
from rlearner_text.openai.tls_listener import TlsListener
from rlearner_text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
access = logging.getLogger(f"{__name__}.access")

# For unfinished answers when the server closes.
CLOSE_S: Final = 2.0
RETRY_AFTER_S: Final = 1  # of status 503
PATH_CHARACTERS: Final = 200  # of a path in the access log
# connections that wait to be accepted, as many as a flood of half-open ones brings
BACKLOG: Final = 1024
OPEN_PATHS: Final = ("/", "/health")  # need no key
FindCaller = Callable[[str | None], Caller | None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _OneLine(logging.Filter):
    """Reduces errors to one line: requests that are not HTTP are the client's mistake."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple):
            problem = str(record.exc_info[1]).strip().partition("\n")[0]
            record.msg = f"{record.getMessage()}: {problem}"
            record.args = None
            record.exc_info = None
        return True


_connections = logging.getLogger(f"{__name__}.connections")
_connections.addFilter(_OneLine())


def bound_socket(bind: str, port: int) -> socket.socket:
    """Return a socket that is bound, but does not listen yet.

    Raises:
        OSError: if the port is not available.
    """
    family, _, _, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Despite old connections.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


class HttpServer:
    """Serves the paths of ``OpenAIRoutes`` and ``AnthropicRoutes``, /v1/models and /health.

    Errors have the form of the request's protocol. A client that disconnects aborts its request. A
    stream sends tokens as the engine streams them, or in one piece if it does not.

    Args:
        tokenizer: of the model served.
        find_caller: returns who sent an Authorization header; None if the key is missing or wrong.
        health: returns the state, for example ``serving``, and the policy version.
        limits: of connections.
        tls: certificate and key; None: plain HTTP.

    Attributes:
        address: for example ``http://127.0.0.1:8000/v1``; set once started.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        find_caller: FindCaller,
        health: Callable[[], tuple[str, int]],
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._find_caller = find_caller
        self._health_of = health
        self._began = int(time.time())
        self._connections = Connections(limits or Limits())
        self._runner: web.AppRunner | None = None
        self._tls = tls
        self._listener: asyncio.Server | None = None
        self._tls_listener: TlsListener | None = None
        self._taken: socket.socket | None = None
        self.address = ""

    @classmethod
    def with_key(
        cls,
        handle: GenerateHandler,
        tokenizer: Tokenizer,
        served_model: ServedModel,
        key: str,
        tls: ssl.SSLContext | None = None,
        key_store: KeyStore | None = None,
    ) -> HttpServer:
        """Return a server with one model and engine, for one key and the named ones."""
        directory = CallerDirectory(handle, tokenizer, served_model, key, key_store)
        return cls(
            tokenizer,
            directory.find,
            lambda: (served_model.state(), served_model.policy_version()),
            tls=tls,
        )

    async def start(self, bind: str, port: int) -> None:
        """Start serving; port 0 is any free one.

        Raises:
            OSError: if the port is not available.
        """
        self.take(bind, port)
        await self.listen()

    def take(self, bind: str, port: int) -> None:
        """Bind the port ahead of ``listen``; connections are refused until then.

        Raises:
            OSError: if the port is not available.
        """
        self.take_socket(bound_socket(bind, port))

    def take_socket(self, bound: socket.socket) -> None:
        """Use this socket, and close it in the end."""
        self._taken = bound

    async def listen(self) -> None:
        """Start serving on the bound port.

        Raises:
            OSError: if another process has started to listen on it.
        """
        assert self._taken is not None
        app = web.Application(middlewares=[self._guard], client_max_size=wire.MAX_PAYLOAD_BYTES)
        app.router.add_get("/", self._root)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        OpenAIRoutes(self._tokenizer).add_routes(app.router)
        AnthropicRoutes(self._tokenizer).add_routes(app.router)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_connections,
            shutdown_timeout=CLOSE_S,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        make_handler = partial(LimitedHandler, server, self._connections, _connections)
        if self._tls is not None:
            self._tls_listener = TlsListener(
                self._taken, self._tls, self._connections, make_handler
            )
            self._tls_listener.start(BACKLOG)
        else:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(
                make_handler, sock=self._taken, backlog=BACKLOG
            )
        host, port = self._taken.getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"

    async def close(self) -> None:
        """Stop serving; idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._tls_listener is not None:
            await self._tls_listener.close()
            self._tls_listener = None
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._taken is not None:
            self._taken.close()
            self._taken = None

    # ----------------------------------------------------------------------------------------------
    # every call

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request and log it in one line, without query, headers and body."""
        # the client disconnected, as nginx writes it
        began = time.monotonic()
        status = 499
        set_call(request, None)
        try:
            response = await self._answered(request, handler)
            status = response.status
            return response
        finally:
            arrived(request, busy=False)
            _log_access(request, status, time.monotonic() - began)

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key and its limits, and convert all errors to error answers."""
        try:
            if request.path in OPEN_PATHS:
                return await handler(request)
            call = self._call(request)
            call.begin()
            try:
                return await handler(request)
            finally:
                call.end()
        except HttpError as problem:
            return _answer_error(request, problem)
        except ConnectionError:
            # never read
            return _answer_error(request, HttpError(503, "the client disconnected"))
        except web.HTTPRequestEntityTooLarge:
            refusal = HttpError(413, f"the body is larger than {wire.MAX_PAYLOAD_BYTES} bytes")
            return _answer_error(request, refusal)
        except web.HTTPException as error:
            phrase = HTTPStatus(error.status).phrase.lower()
            refusal = HttpError(error.status, f"{request.method} {request.path}: {phrase}")
            return _answer_error(request, refusal)
        except Exception:
            log.exception("a request to %s failed", request.path)
            return _answer_error(request, HttpError(500, FAILED))

    def _call(self, request: web.Request) -> Call:
        caller = self._find_caller(request.headers.get("Authorization"))
        # as Anthropic's clients send it
        key = request.headers.get("x-api-key")
        if caller is None and key is not None:
            caller = self._find_caller(f"Bearer {key}")
        if caller is None:
            raise HttpError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY "
                "or x-api-key: KEY",
                code="invalid_api_key",
            )
        call = Call(caller)
        set_call(request, call)
        return call

    async def _root(self, _: web.Request) -> web.Response:
        """Answer a client that only looks whether there is a server."""
        return web.json_response({"name": "rlearner"})

    async def _health(self, _: web.Request) -> web.Response:
        state, version = self._health_of()
        status = 200 if state == "serving" else 503
        return web.json_response({"status": state, "policy_version": version}, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        models = [self._describe_model(request)]
        if not speaks_anthropic(request):
            return web.json_response({"object": "list", "data": models})
        name = models[0]["id"]
        page = {"has_more": False, "first_id": name, "last_id": name}
        return web.json_response({"data": models, **page})

    async def _model(self, request: web.Request) -> web.Response:
        served_model = backend_of(request).served_model
        name = request.match_info["name"]
        if not served_model.any_model and name not in (served_model.model, served_model.path):
            raise unknown_model(name, served_model)
        return web.json_response(self._describe_model(request))

    def _describe_model(self, request: web.Request) -> dict[str, Any]:
        served_model = backend_of(request).served_model
        if speaks_anthropic(request):
            return describe_model(served_model, self._began)
        return {
            "id": served_model.model,
            "object": "model",
            "created": self._began,
            "owned_by": "rlearner",
            "root": served_model.path,
            "max_model_len": served_model.max_context_tokens,
            "policy_version": served_model.policy_version(),
        }


def _log_access(request: web.Request, status: int, seconds: float) -> None:
    """Log the peer, the key's name, tokens, method, path, status and time of a request."""
    call = call_of(request)
    path = ascii(request.path[:PATH_CHARACTERS])
    name = "-" if call is None else call.caller.name
    tokens = "-"
    if call is not None and call.prompt_tokens:
        tokens = f"{call.prompt_tokens}+{call.output_tokens}"
    access.info(
        "%s", f"{request.remote} {name} {tokens} {request.method} {path} {status} {seconds:.3f} s"
    )


def _answer_error(request: web.Request, problem: HttpError) -> web.Response:
    """Answer in the form of the request's protocol."""
    retry_s = RETRY_AFTER_S if problem.status == 503 else problem.retry_s
    headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = problem.body
    if speaks_anthropic(request):
        body = error_body(problem)
    answer = web.json_response(body, status=problem.status, headers=headers)
    if problem.status in (408, 413):
        # The rest of the body is not read.
        answer.force_close()
    return answer
