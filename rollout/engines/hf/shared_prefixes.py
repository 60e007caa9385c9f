"""Finds slots that hold, or will hold, the beginning of another request's context.

The requests of a group have the same prompt, and those of other groups often begin alike: with a
system prompt, tools, examples. Such a prefix is computed once and copied, also from a slot whose
request has ended, until another one starts there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rollout.engines.hf.request_row import RequestRow
from rollout.job_queue import Tokens
from rollout.scheduler import common_prefix

MIN_SHARED: Final = 8  # tokens; copying the KV of fewer costs more than computing them


class SharedPrefixes:
    """The rows whose slots hold KV of the current weights, by the beginning of their prompts.

    Args:
        whole_prompts: a slot can only be copied at its very end, as with recurrent states.
    """

    def __init__(self, *, whole_prompts: bool) -> None:
        self._whole_prompts = whole_prompts
        self._holders: dict[int, RequestRow] = {}  # by slot; the row may have ended
        # the newest row whose prompt has this beginning
        self._rows: dict[int, RequestRow] = {}

    def add(self, row: RequestRow) -> None:
        """Note that a row has started in its slot, and set what it takes over from another."""
        prompt = row.job.tokens
        former = self._holders.get(row.slot)
        if former is not None and not self._whole_prompts:
            held = common_prefix(former.tokens[: former.cached], prompt[:-1])
            row.cached = row.reused = max(row.reused, held if held >= MIN_SHARED else 0)
        self.forget(row.slot)
        self._find_source(row)
        self._holders[row.slot] = row
        for key in self._keys(prompt):
            self._rows[key] = row

    def forget(self, slot: int) -> None:
        """Note that a slot does not hold anything any more."""
        former = self._holders.pop(slot, None)
        if former is not None:
            for key in self._keys(former.job.tokens):
                if self._rows.get(key) is former:
                    del self._rows[key]

    def clear(self) -> None:
        """Forget all slots: what they hold is, or will be, of other weights."""
        self._holders.clear()
        self._rows.clear()

    def is_usable(self, source: RequestRow, length: int) -> bool:
        """Return whether a row has, or will have, ``length`` tokens in its slot to copy.

        A recurrent state is that of all tokens before it, so it can only be copied before the row
        goes on.
        """
        if self._holders.get(source.slot) is not source:
            return False
        if source.has_ended:
            return source.cached == length if self._whole_prompts else source.cached >= length
        return source.cached <= length or not self._whole_prompts

    def _find_source(self, row: RequestRow) -> None:
        """Let a row wait for the KV of the one that has most of its prompt."""
        prompt = row.job.tokens
        source = None
        for key in self._keys(prompt):
            source = self._rows.get(key, source)
        if source is None:
            return
        # the last token makes logits
        shared = common_prefix(source.tokens[: source.length], prompt[:-1])
        while source.source is not None and source.num_shared >= shared:
            source = source.source  # it waits, too
        if self._whole_prompts and shared < len(prompt) - 1:
            return
        if shared - row.cached < MIN_SHARED or not self.is_usable(source, shared):
            return
        is_there = source.cached >= shared
        # a pass is a long time to wait for a small part
        if is_there or 2 * (shared - row.cached) >= row.length - row.cached:
            row.source, row.num_shared = source, shared

    def _keys(self, prompt: Tokens) -> Iterator[int]:
        """Yield a key of each beginning of a prompt that counts, from short to long: of every
        multiple of MIN_SHARED tokens, and of the whole prompt.
        """
        text = prompt.tobytes()
        size = MIN_SHARED * prompt.itemsize
        key = 0
        if not self._whole_prompts:
            for end in range(size, len(text), size):
                key = hash((key, text[end - size : end]))
                yield key
        yield hash(text)
