"""Asks a retrieval server in the form of Search-R1; see ``server``."""

from __future__ import annotations

import http.client
import json
from typing import Any, Final
from urllib.parse import urlsplit

from broker.errors import RlearnerError, reason_of

MAX_ANSWER_BYTES: Final = 8 << 20


class RetrieverDown(RlearnerError):
    """The server cannot be reached, or does not speak the protocol."""


def retrieve(url: str, query: str, limit: int, timeout_s: float, api_key: str = "") -> list[str]:
    """Return the contents of the best documents, best first: the title, a line break, the text.

    Args:
        url: of the server, with or without ``/retrieve``.

    Raises:
        RetrieverDown: without an answer of the protocol; one line.
    """
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if not path.endswith("/retrieve"):
        path += "/retrieve"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # a lone surrogate of the policy cannot be encoded
    text = query.encode("utf-8", "replace").decode()
    body = json.dumps({"queries": [text], "topk": limit, "return_scores": True})
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", path, body.encode(), headers)
        reply = connection.getresponse()
        data = reply.read(MAX_ANSWER_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        raise RetrieverDown(f"no retriever at {url}: {reason_of(error)}") from None
    finally:
        connection.close()
    if reply.status != 200 or len(data) > MAX_ANSWER_BYTES:
        excerpt = " ".join(data[:200].decode("utf-8", "replace").split())
        raise RetrieverDown(f"retriever {url} answered {reply.status}: {excerpt}")
    try:
        (documents,) = json.loads(data)["result"]
        return [_contents_of(document) for document in documents]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RetrieverDown(f"retriever {url} answered {data[:200]!r}, not a result") from None


def _contents_of(document: dict[str, Any]) -> str:
    contents = document.get("document", document)["contents"]
    if not isinstance(contents, str):
        raise TypeError
    return contents
