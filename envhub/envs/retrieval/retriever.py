"""Finds the best documents of a corpus for queries: by meaning (an encoder), or by words (BM25)."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from envhub.envs.retrieval.encoder import EncoderOptions, TextEncoder
from envhub.envs.retrieval.indexes import (
    ExactIndex,
    GraphIndex,
    IndexKind,
    build_index,
    load_index,
)
from envhub.envs.tools.corpus import Corpus

log = logging.getLogger(__name__)


class ScoredDocument(msgspec.Struct, frozen=True):
    """A document of a result; ``position`` is that in the corpus."""

    position: int
    score: float


class Retriever(Protocol):
    """What answers queries."""

    def search(self, queries: Sequence[str], limit: int) -> list[list[ScoredDocument]]:
        """Return the best documents for each query, best first."""
        ...


class WordRetriever:
    """Searches by words; all scores are 0, as ranks alone are known."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus

    def search(self, queries: Sequence[str], limit: int) -> list[list[ScoredDocument]]:
        return [
            [ScoredDocument(position, 0.0) for position in self._corpus.index.search(query, limit)]
            for query in queries
        ]


class DenseRetriever:
    """Searches by the vectors of an encoder."""

    def __init__(self, encoder: TextEncoder, index: ExactIndex | GraphIndex) -> None:
        self._encoder = encoder
        self._index = index

    def search(self, queries: Sequence[str], limit: int) -> list[list[ScoredDocument]]:
        positions, scores = self._index.search(self._encoder.encode_queries(queries), limit)
        return [
            [
                ScoredDocument(int(position), float(score))
                for position, score in zip(row, row_scores, strict=True)
                if position >= 0
            ]
            for row, row_scores in zip(positions, scores, strict=True)
        ]


def load_dense(
    corpus: Corpus, options: EncoderOptions, kind: IndexKind, store: Path | None, threads: int = 1
) -> DenseRetriever:
    """Return a retriever, whose index is read from ``store`` if that is of the same corpus.

    Raises:
        UserError: if the encoder cannot be loaded, or a package is missing.
    """
    encoder = TextEncoder(options)
    texts = [
        f"{title} {text}".strip() for title, text in zip(corpus.titles, corpus.texts, strict=True)
    ]
    origin = _origin_of(texts, options, kind)
    if store is not None and _read_origin(store) == origin:
        log.info("index of %d documents read from %s", len(texts), store)
        return DenseRetriever(encoder, load_index(kind, store / "index"))
    log.info("encoding %d documents", len(texts))
    index = build_index(kind, encoder.encode_passages(texts), threads)
    if store is not None:
        store.mkdir(parents=True, exist_ok=True)
        # removed first: an index that is half written is not used
        (store / "origin.json").unlink(missing_ok=True)
        index.save(store / "index")
        (store / "origin.json").write_text(json.dumps(origin), encoding="utf-8")
    return DenseRetriever(encoder, index)


def _origin_of(texts: Sequence[str], options: EncoderOptions, kind: IndexKind) -> dict[str, object]:
    """Return what an index depends on, besides the weights in the encoder's folder."""
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text.encode("utf-8", "surrogatepass"))
    settings = {key: value for key, value in asdict(options).items() if key != "device"}
    return {**settings, "kind": kind, "corpus": digest.hexdigest()}


def _read_origin(store: Path) -> object:
    try:
        return json.loads((store / "origin.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
