"""Serves a retriever over HTTP, in the form of Search-R1 (Jin et al. 2025, arXiv:2503.09516).

    POST /retrieve {"queries": ["…"], "topk": 3, "return_scores": true}
    {"result": [[{"document": {"id": "7", "contents": "title\\ntext"}, "score": 0.9}]]}

Without ``return_scores`` the inner lists hold the documents themselves. ``GET /health`` answers
``{"status": "serving", "documents": 100}``. Queries that arrive while others are encoded are
encoded together.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final

import msgspec
from aiohttp import web

from envhub.envs.retrieval.retriever import Retriever, ScoredDocument
from envhub.envs.tools.corpus import Corpus

MAX_QUERIES: Final = 256  # of a request
MAX_TOPK: Final = 100
MAX_BODY: Final = 1 << 20
BATCH: Final = 64  # queries that are encoded together


class RetrieveRequest(msgspec.Struct):
    """The body of a request."""

    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class QueryBatcher:
    """Runs the queries of all requests in one thread, several at a time."""

    def __init__(self, retriever: Retriever) -> None:
        self._retriever = retriever
        self._waiting: list[tuple[str, int, asyncio.Future[list[ScoredDocument]]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def search(self, query: str, limit: int) -> list[ScoredDocument]:
        """Return the best documents."""
        future: asyncio.Future[list[ScoredDocument]] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, limit, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch = self._waiting[:BATCH]
            del self._waiting[:BATCH]
            queries = [query for query, _, _ in batch]
            most = max(limit for _, limit, _ in batch)
            try:
                results = await asyncio.to_thread(self._retriever.search, queries, most)
            except Exception as error:  # noqa: BLE001 - goes to those who wait
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, limit, future), documents in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(documents[:limit])


class RetrieverServer:
    """The endpoints.

    Args:
        topk: documents per query, where a request does not say.
        api_key: that requests must bring; empty: none.
    """

    def __init__(self, corpus: Corpus, retriever: Retriever, topk: int, api_key: str = "") -> None:
        self._corpus = corpus
        self._batcher = QueryBatcher(retriever)
        self._topk = topk
        self._api_key = api_key

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/health", self._health)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "serving", "documents": len(self._corpus.texts)})

    async def _retrieve(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._api_key and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            return _refuse(401, "the API key is missing or wrong")
        try:
            query = msgspec.json.decode(await request.read(), type=RetrieveRequest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _refuse(400, f"not a request: {error}")
        limit = self._topk if query.topk is None else query.topk
        if not 1 <= limit <= MAX_TOPK:
            return _refuse(400, f"topk: {limit} is not allowed; 1 to {MAX_TOPK}")
        if len(query.queries) > MAX_QUERIES:
            return _refuse(400, f"{len(query.queries)} queries, the limit is {MAX_QUERIES}")
        results = await asyncio.gather(
            *(self._batcher.search(text, limit) for text in query.queries)
        )
        body = [[self._entry(each, query.return_scores) for each in result] for result in results]
        return web.json_response({"result": body})

    def _entry(self, document: ScoredDocument, has_score: bool) -> dict[str, Any]:
        position = document.position
        contents = f"{self._corpus.titles[position]}\n{self._corpus.texts[position]}"
        entry = {"id": str(position), "contents": contents}
        if has_score:
            return {"document": entry, "score": document.score}
        return entry


def _refuse(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
