"""Bounded store of answers that later requests of the Responses API may reference by id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

Item = dict[str, Any]

MOST_BYTES: Final = 32 << 20


class AnswerStore:
    """Earlier answers of one endpoint; evicts the oldest beyond ``most_bytes`` of requests."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._conversations: OrderedDict[str, tuple[list[Item], list[str], int]] = OrderedDict()
        self._items: dict[str, Item] = {}
        self._bytes = 0

    def add(
        self, response_id: str, items: Sequence[Item], output: Sequence[Item], size: int
    ) -> None:
        """Store the whole input and the answer's items by id; ``size``: bytes of the request."""
        ids = [str(item["id"]) for item in output]
        self._conversations[response_id] = ([*items, *output], ids, size)
        self._items |= dict(zip(ids, output, strict=True))
        self._bytes += size
        while self._bytes > self._most and len(self._conversations) > 1:
            _, (_, dropped, freed) = self._conversations.popitem(last=False)
            self._bytes -= freed
            for dropped_item in dropped:
                del self._items[dropped_item]

    def conversation(self, response_id: str) -> list[Item] | None:
        """Return input and output of a stored answer, or None."""
        entry = self._conversations.get(response_id)
        return None if entry is None else entry[0]

    def item(self, item_id: str) -> Item | None:
        """Return an item of a stored answer, or None."""
        return self._items.get(item_id)
