"""The OpenAI-compatible HTTP API of a rollout server; off unless ``rollout.http_port`` is set.

Key, tokenizer and port are acquired before the engine loads, which takes minutes, so that their errors appear at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from broker.errors import ConfigError
from broker.nats.addresses import INSECURE
from broker.system.connections import is_loopback
from rlearner_text.openai import api_keys
from rlearner_text.openai.backends import GenerateHandler, ServedModel
from rlearner_text.openai.certificates import server_tls
from rlearner_text.openai.named_keys import KeyStore
from rlearner_text.openai.server import HttpServer
from rlearner_text.tokenizer import Tokenizer
from rollout.config import RolloutSection
from rollout.engines.base import Engine, StreamingEngine

log = logging.getLogger(__name__)


def served_model(engine: Engine, section: RolloutSection, run_model: str, state: Callable[[], str]) -> ServedModel:
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


@dataclass(frozen=True)
class HttpApi:
    """The API of one rollout server, bound to its port; ``listen`` starts serving.

    Attributes:
        key_place: where the user finds the API key.
    """

    server: HttpServer
    served: ServedModel
    port: int
    key_place: str

    async def listen(self) -> None:
        """Start serving.

        Raises:
            UserError: if another process has taken the port.
        """
        with _port_refused(self.port):
            await self.server.listen()
        model, place = self.served.model, self.key_place
        log.info("OpenAI-compatible API at %s, model %s, API key in %s", self.server.address, model, place)

    async def close(self) -> None:
        await self.server.close()


async def prepare_http(
    handle: GenerateHandler,
    served: ServedModel,
    section: RolloutSection,
    *,
    bind: str,
    port: int,
    trust_remote_code: bool,
) -> HttpApi:
    """Prepare the API without serving, so that its errors appear before the engine loads.

    Raises:
        UserError: if the port or the key is not available, the certificate cannot be used, other hosts could read what
            is sent, or the model has no tokenizer.
    """
    tls = _tls(section, bind)
    key, key_place = api_keys.find_key()
    named = KeyStore()
    named.read()  # checked now, and again with each change
    tokenizer = await asyncio.to_thread(Tokenizer.load, served.path, trust_remote_code=trust_remote_code)
    server = HttpServer.with_key(handle, tokenizer, served, key, tls, named)
    with _port_refused(port):
        try:
            server.take(bind, port)
        except OSError:
            await server.close()
            raise
    return HttpApi(server, served, port, key_place)


def _tls(section: RolloutSection, bind: str) -> ssl.SSLContext | None:
    if section.http_tls_cert is not None and section.http_tls_key is not None:
        names = {"cert_name": "rollout.http_tls_cert", "key_name": "rollout.http_tls_key"}
        return server_tls(section.http_tls_cert, section.http_tls_key, **names)
    if not is_loopback(bind) and not os.environ.get(INSECURE):
        allowed = "an address of loopback without TLS, because others could read keys and prompts; add --tls-cert and "
        raise ConfigError("rollout.http_bind", bind, allowed + "--tls-key, or --insecure on a network that you trust")
    return None


@contextmanager
def _port_refused(port: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        allowed = f"the port is not available ({error.strerror}); choose another, or 0 for any"
        raise ConfigError("rollout.http_port", port, allowed) from None
