"""Whether an OpenAI-compatible endpoint would answer, looked at before anything starts."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from broker.settings.preflight import Finding, Status

WITHIN_S: Final = 3.0


def look(key: str, base_url: str, api_key_env: str, *, named: bool, needed: bool) -> Finding:
    """One line about an endpoint, which is asked for its models.

    Args:
        key: of the settings that name it, for example ``rollout.engine_args``.
        named: whether the user named ``api_key_env``; else none may be needed.
        needed: whether who asks it gives up where it is not there at once; else it may come later.
    """
    if named and not os.environ.get(api_key_env):
        return _finding(key, "missing", f"its api_key_env names {api_key_env}, which is not set", f"export {api_key_env}=…")
    status, problem = asyncio.run(_ask(base_url, os.environ.get(api_key_env, "")))
    if status in (401, 403):
        return _finding(key, "missing", f"{base_url} does not accept the key in {api_key_env}: {problem}", f"export {api_key_env}=…")
    if problem and not status:
        return _finding(key, "missing" if needed else "warning", problem, f"curl {base_url.rstrip('/')}/models  # must answer")
    return _finding(key, "ok", f"{base_url} answers")


def _finding(key: str, status: Status, found: str, mend: str = "") -> Finding:
    return Finding("endpoints", key, status, found, mend)


async def _ask(base_url: str, key: str) -> tuple[int, str]:
    """The status of a refusal, 0 for none, and what is wrong, empty where nothing is. Not every endpoint lists its models."""
    from text.openai.client import Endpoint, Refused

    endpoint = Endpoint(base_url, key, timeout_s=WITHIN_S, retries=0, base_s=1.0)
    try:
        await endpoint.get("/models")
    except Refused as error:
        return error.status, str(error)
    except RuntimeError as error:
        return 0, str(error)
    finally:
        await endpoint.close()
    return 0, ""
