"""Checks before anything starts whether an OpenAI-compatible endpoint answers."""

from __future__ import annotations

import asyncio
from typing import Final

from broker.errors import UserError
from broker.settings.preflight import PreflightFinding, Status
from broker.settings.secret import SecretRef

WITHIN_S: Final = 3.0


def check_endpoint(
    key: str, base_url: str, api_key: SecretRef, *, is_named: bool, is_needed: bool
) -> PreflightFinding:
    """Request an endpoint's models and return a finding.

    Args:
        key: the setting that names it, for example ``rollout.engine_args``.
        is_named: whether the user set ``api_key``; if not, the endpoint may need no key.
        is_needed: whether its client fails at once without the endpoint, which may else start
            later.
    """
    remedy = f"export {api_key.env}=…" if api_key.env else f"write the key to {api_key.file}"
    try:
        secret = api_key.require(f"{key}.api_key", base_url) if is_named else api_key.find(base_url)
    except UserError as error:
        return _endpoint_finding(key, "missing", str(error), remedy)
    status, problem = asyncio.run(_request_models(base_url, secret))
    if status in (401, 403):
        return _endpoint_finding(
            key, "missing", f"{base_url} does not accept the key in {api_key}: {problem}", remedy
        )
    if problem and not status:
        curl = f"curl {base_url.rstrip('/')}/models  # must answer"
        return _endpoint_finding(key, "missing" if is_needed else "warning", problem, curl)
    return _endpoint_finding(key, "ok", f"{base_url} answers")


def _endpoint_finding(key: str, status: Status, problem: str, remedy: str = "") -> PreflightFinding:
    return PreflightFinding("endpoints", key, status, problem, remedy)


async def _request_models(base_url: str, key: str) -> tuple[int, str]:
    """Return the status of an error answer (else 0) and the problem (else empty)."""
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
