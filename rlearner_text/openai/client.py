"""Client of OpenAI-compatible endpoints: one JSON object out, one back, with retries."""

from __future__ import annotations

import asyncio
import email.utils
import logging
import random
from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final

import aiohttp

from broker.contract import strict

log = logging.getLogger(__name__)

RETRY_STATUSES: Final = frozenset({408, 409, 429, 500, 502, 503, 504})  # statuses worth a retry
MOST_BYTES: Final = 64 * 2**20  # of an answer
LONGEST_BACKOFF_S: Final = 30.0


class EndpointError(Exception):
    """An error status that a retry would not change, with the endpoint's message in one line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the endpoint answered {status}: {message}")
        self.status = status


def backoff_s(attempt: int, base_s: float, headers: Mapping[str, str], *, chance: float) -> float:
    """Return the seconds to wait before the next try.

    Args:
        attempt: number of failed tries, from 1.
        base_s: first backoff; doubles with every try and is drawn from its upper half.
        headers: of the last answer, if any. A later Retry-After takes precedence: seconds, or a
            date (RFC 9110, 10.2.3) relative to the answer's own Date, because clocks may differ.
        chance: uniform in [0, 1).
    """
    own: float = min(LONGEST_BACKOFF_S, base_s * 2 ** (attempt - 1)) * (0.5 + chance / 2)
    return max(own, _asked_for(headers))


def _asked_for(headers: Mapping[str, str]) -> float:
    retry_after = headers.get("Retry-After", "")
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = _unix_s(retry_after) - _unix_s(headers.get("Date", ""))
        except ValueError:
            return 0.0
    return seconds if 0 < seconds < 86400 else 0.0


def _unix_s(date: str) -> float:
    # HTTP dates are GMT
    return email.utils.parsedate_to_datetime(date).replace(tzinfo=UTC).timestamp()


class EndpointClient:
    """A connection pool for one base URL.

    Args:
        base_url: for example ``http://127.0.0.1:8000/v1``.
        key: sent as bearer token; empty: none.
        timeout_s: of one try.
        retries: tries after the first.
        base_s: see ``backoff_s``.
    """

    def __init__(
        self, base_url: str, key: str, *, timeout_s: float, retries: int, base_s: float
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._retries = retries
        self._base_s = base_s
        self._key = key
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            connector=aiohttp.TCPConnector(limit=0),  # callers limit themselves
        )

    async def get(self, path: str) -> dict[str, Any]:
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Post a body and return the answer.

        Raises:
            EndpointError: if the endpoint answers with a status that a retry would not change.
            RuntimeError: if the last try gets no answer, or one that is not a JSON object.
        """
        return await self._ask("POST", path, body)

    async def close(self) -> None:
        await self._session.close()

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        url = self._base_url + path
        for attempt in range(1, self._retries + 2):
            headers: Mapping[str, str] = {}
            try:
                async with self._session.request(
                    method, url, json=body, allow_redirects=False
                ) as response:
                    if response.status == 200:
                        return _parse_object(await _read_body(response))
                    message = self._without_key(_error_message(await _read_body(response)))
                    problem = f"{response.status}: {message}"
                    if response.status not in RETRY_STATUSES:
                        raise EndpointError(response.status, problem.partition(": ")[2])
                    headers = response.headers
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = " ".join(str(error).split()) or type(error).__name__
            if attempt <= self._retries:
                wait_s = backoff_s(attempt, self._base_s, headers, chance=random.random())
                log.info("%s: %s; try %d in %.1f s", path, problem, attempt + 1, wait_s)
                await asyncio.sleep(wait_s)
        raise RuntimeError(f"{url} gave no answer in {self._retries + 1} tries: {problem}")

    def _without_key(self, text: str) -> str:
        """Mask the key, which some endpoints repeat when they reject it."""
        return text.replace(self._key, "***") if self._key else text


async def _read_body(response: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > MOST_BYTES:
            raise ValueError(f"the answer is larger than {MOST_BYTES} bytes")
    return bytes(data)


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        value = strict.parse_json(raw)
    except strict.BadJson as error:
        raise ValueError(f"the answer is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("the answer is not a JSON object")
    return value


def _error_message(raw: bytes) -> str:
    """Return the message of an error body in one line."""
    try:
        reply = _parse_object(raw)
    except ValueError:
        return " ".join(raw[:300].decode(errors="replace").split())
    error = reply.get("error", reply)
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:300]
