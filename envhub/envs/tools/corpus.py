"""Reads documents from a JSONL file and searches them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from broker.errors import ConfigError, DataError
from envhub.envs.tools.bm25 import SearchIndex


@dataclass(frozen=True)
class Corpus:
    """Documents and their index."""

    titles: tuple[str, ...]
    texts: tuple[str, ...]
    index: SearchIndex

    def find(self, query: str, limit: int, max_chars: int) -> list[str]:
        """Return the best documents, each as its title and its text, cut to ``max_chars``."""
        documents = []
        for place in self.index.search(query, limit):
            title = self.titles[place]
            text = self.texts[place]
            text = text if len(text) <= max_chars else text[: max_chars - 1] + "…"
            documents.append(f"{title}: {text}" if title else text)
        return documents


@lru_cache(maxsize=4)
def read_corpus(path: str, text: str, title: str) -> Corpus:
    """Return the documents of a file; hundreds of environments share one copy.

    Args:
        path: one JSON object per line.
        text: column of the document's text.
        title: column of its title, which may be missing.

    Raises:
        ConfigError: if the file is missing or empty.
        DataError: if a line is malformed; names it, from 1.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError("corpus", path, "there is no such file")
    titles = []
    texts = []
    decoder = msgspec.json.Decoder(dict[str, Any])
    with file.open("rb") as lines:
        for line, data in enumerate(lines, start=1):
            if not data.strip():
                continue
            try:
                record = decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(path, line, f"not a JSON object: {error}") from None
            content = record.get(text)
            if not isinstance(content, str) or not content.strip():
                columns = ", ".join(sorted(record)) or "nothing"
                raise DataError(
                    path,
                    line,
                    f"column {text!r} holds {content!r:.80}, not a text; the line has {columns}",
                )
            titles.append(str(record.get(title) or ""))
            texts.append(" ".join(content.split()))
    if not texts:
        raise ConfigError("corpus", path, "the file holds no documents")
    index = SearchIndex([f"{title} {text}" for title, text in zip(titles, texts, strict=True)])
    return Corpus(tuple(titles), tuple(texts), index)
