"""The OpenAI-compatible HTTP API of a rollout server, beside the stream; off unless ``rollout.http_port`` is set.

Opening it means: key, tokenizer, port, and one line in the log that says where.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from broker.errors import ConfigError
from rollout.config import RolloutSection
from rollout.engines.base import Engine, TappedEngine
from text.openai import keys
from text.openai.desk import Handle, Served
from text.openai.server import HttpServer
from text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def served_by(engine: Engine, section: RolloutSection, run_model: str, state: Callable[[], str]) -> Served:
    """What clients are told of a server and its engine.

    Args:
        run_model: what the run started from.
        state: ``serving``, or why not.
    """
    return Served(
        model=section.policy,
        path=section.model_path or run_model,
        max_context_tokens=section.max_context_tokens,
        state=state,
        policy_version=lambda: engine.policy_version,
        top_logprobs=isinstance(engine, TappedEngine) and engine.tells_top,
    )


async def open_http(handle: Handle, served: Served, *, bind: str, port: int, trust_remote_code: bool) -> HttpServer:
    """A server that answers.

    Raises:
        UserError: the port or the key cannot be had, or the model has no tokenizer.
    """
    key, where = keys.find_key()
    tokenizer = await asyncio.to_thread(Tokenizer.load, served.path, trust_remote_code=trust_remote_code)
    server = HttpServer.with_key(handle, tokenizer, served, key)
    try:
        await server.start(bind, port)
    except OSError as error:
        await server.close()
        raise ConfigError("rollout.http_port", port, f"it cannot be had ({error.strerror}); give another, or 0 for any") from None
    except BaseException:
        await server.close()
        raise
    log.info("OpenAI-compatible API at %s, model %s, API key in %s", server.address, served.model, where)
    return server
