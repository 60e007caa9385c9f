"""Finds the nearest of many vectors of length 1: exactly, or by a graph (HNSW) of usearch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from broker.errors import NotInstalled

Vectors = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
IndexKind = Literal["exact", "hnsw"]
# of the graph: links per vector, and candidates while it is built and searched
LINKS: Final = 16
BUILD_CANDIDATES: Final = 128
SEARCH_CANDIDATES: Final = 128
# queries times vectors that are compared at once, so that scores need at most 256 MiB
MAX_SCORES: Final = 1 << 26


class VectorIndex(Protocol):
    """Vectors that can be searched."""

    def search(self, queries: Vectors, limit: int) -> tuple[Positions, Vectors]:
        """Return positions and scores of the nearest, best first, each (queries, limit).

        Where there are fewer vectors, positions are -1.
        """
        ...

    def save(self, path: Path) -> None:
        """Write it to a file."""
        ...


class ExactIndex:
    """Compares each query with all vectors (count, dimensions)."""

    def __init__(self, vectors: Vectors) -> None:
        self._vectors = vectors

    @classmethod
    def load(cls, path: Path) -> ExactIndex:
        """Map a file that ``save`` has written; processes share its memory."""
        return cls(np.load(path, mmap_mode="r"))

    def save(self, path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, self._vectors)

    def search(self, queries: Vectors, limit: int) -> tuple[Positions, Vectors]:
        count = min(limit, len(self._vectors))
        rows = max(1, MAX_SCORES // max(len(self._vectors), 1))
        parts = [
            self._search_part(queries[start : start + rows], count, limit)
            for start in range(0, len(queries), rows)
        ]
        positions = np.concatenate([part[0] for part in parts])
        scores = np.concatenate([part[1] for part in parts])
        return positions, scores

    def _search_part(self, queries: Vectors, count: int, limit: int) -> tuple[Positions, Vectors]:
        scores = queries @ self._vectors.T
        nearest = np.argpartition(-scores, count - 1, axis=1)[:, :count]
        values = np.take_along_axis(scores, nearest, axis=1)
        order = np.argsort(-values, axis=1, kind="stable")
        positions = np.full((len(queries), limit), -1, np.int64)
        sorted_scores = np.zeros((len(queries), limit), np.float32)
        positions[:, :count] = np.take_along_axis(nearest, order, axis=1)
        sorted_scores[:, :count] = np.take_along_axis(values, order, axis=1)
        return positions, sorted_scores


class GraphIndex:
    """Searches a graph: much faster for large collections, and nearly as good."""

    def __init__(self, index: Any) -> None:
        self._index = index

    @classmethod
    def build(cls, vectors: Vectors, threads: int = 1) -> GraphIndex:
        """Build the graph of vectors (count, dimensions).

        Raises:
            NotInstalled: without usearch.
        """
        index = _usearch().Index(
            ndim=vectors.shape[1],
            metric="ip",
            dtype="f32",
            connectivity=LINKS,
            expansion_add=BUILD_CANDIDATES,
            expansion_search=SEARCH_CANDIDATES,
        )
        index.add(np.arange(len(vectors)), vectors, threads=threads)
        return cls(index)

    @classmethod
    def load(cls, path: Path) -> GraphIndex:
        """Map a file that ``save`` has written."""
        index = _usearch().Index.restore(str(path), view=True)
        index.expansion_search = SEARCH_CANDIDATES
        return cls(index)

    def save(self, path: Path) -> None:
        self._index.save(str(path))

    def search(self, queries: Vectors, limit: int) -> tuple[Positions, Vectors]:
        positions = np.full((len(queries), limit), -1, np.int64)
        scores = np.zeros((len(queries), limit), np.float32)
        for row, query in enumerate(queries):
            matches = self._index.search(query, limit, threads=1)
            positions[row, : len(matches)] = matches.keys
            scores[row, : len(matches)] = 1.0 - matches.distances
        return positions, scores


def build_index(kind: IndexKind, vectors: Vectors, threads: int = 1) -> ExactIndex | GraphIndex:
    """Return an index of vectors (count, dimensions) of length 1."""
    if kind == "hnsw":
        return GraphIndex.build(vectors, threads)
    return ExactIndex(vectors)


def load_index(kind: IndexKind, path: Path) -> ExactIndex | GraphIndex:
    """Return the index in a file."""
    if kind == "hnsw":
        return GraphIndex.load(path)
    return ExactIndex.load(path)


def _usearch() -> Any:
    try:
        from usearch import index
    except ImportError:
        raise NotInstalled(
            "--index hnsw needs usearch: pip install 'rlearner[retriever]'; or --index exact"
        ) from None
    return index
