"""Checks before anything starts whether an OpenAI-compatible endpoint answers."""

from __future__ import annotations

import asyncio
import os
from typing import Final

from broker.settings.preflight import PreflightFinding, Status

WITHIN_S: Final = 3.0


def check_endpoint(key: str, base_url: str, api_key_env: str, *, named: bool, needed: bool) -> PreflightFinding:
    """Request an endpoint's models and return a finding.

    Args:
        key: the setting that names it, for example ``rollout.engine_args``.
        named: whether the user set ``api_key_env``; if not, the endpoint may need no key.
        needed: whether its client fails at once without the endpoint; if not, it may start later.
    """
    export = f"export {api_key_env}=…"
    if named and not os.environ.get(api_key_env):
        return _finding(key, "missing", f"its api_key_env names {api_key_env}, which is not set", export)
    status, problem = asyncio.run(_ask(base_url, os.environ.get(api_key_env, "")))
    if status in (401, 403):
        return _finding(key, "missing", f"{base_url} does not accept the key in {api_key_env}: {problem}", export)
    if problem and not status:
        remedy = f"curl {base_url.rstrip('/')}/models  # must answer"
        return _finding(key, "missing" if needed else "warning", problem, remedy)
    return _finding(key, "ok", f"{base_url} answers")


def _finding(key: str, status: Status, found: str, remedy: str = "") -> PreflightFinding:
    return PreflightFinding("endpoints", key, status, found, remedy)


async def _ask(base_url: str, key: str) -> tuple[int, str]:
    """Return the status of an error answer (else 0) and the problem (else empty); some endpoints do not list models."""
    from rlearner_text.openai.client import EndpointClient, EndpointError

    endpoint = EndpointClient(base_url, key, timeout_s=WITHIN_S, retries=0, base_s=1.0)
    try:
        await endpoint.get("/models")
    except EndpointError as error:
        return error.status, str(error)
    except RuntimeError as error:
        return 0, str(error)
    finally:
        await endpoint.close()
    return 0, ""
