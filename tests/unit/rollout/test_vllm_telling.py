"""Deltas of vLLM become pieces: each token once, with its version, and none before its weights are
known to be right. Without vLLM.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from rlearner_text.openai.token_events import TokenEvent, TokenListener
from rollout.engines.vllm.completion_stream import CompletionStream, VersionSpan, likeliest


@dataclass
class Flat:
    """As vLLM's FlatLogprobs: one entry for each place unless told otherwise."""

    logprobs: list[float]
    token_ids: list[int] = field(default_factory=list)
    size: int = 1

    @property
    def start_indices(self) -> list[int]:
        return list(range(0, len(self.logprobs), self.size))

    @property
    def end_indices(self) -> list[int]:
        return [start + self.size for start in self.start_indices]


@dataclass
class Delta:
    token_ids: list[int]
    logprobs: Any
    finish_reason: str | None = None
    weight_versions: Any = None


def delta(*ids: int, logprob: float = -0.5) -> Delta:
    return Delta(list(ids), Flat([logprob] * len(ids), list(ids)))


async def right(_: str) -> bool:
    return True


async def test_each_token_is_told_once_with_its_version() -> None:
    told: list[TokenEvent] = []
    telling = CompletionStream(TokenListener(told.append), greedy=False, good=right)
    await telling.take(delta(5, 6), [VersionSpan("1:0", 0, 2)])
    await telling.take(delta(7, 8, 9), [VersionSpan("1:0", 0, 3), VersionSpan("2:4", 3, 5)])
    await telling.take(delta(), [VersionSpan("1:0", 0, 3), VersionSpan("2:4", 3, 5)])
    await telling.take(delta(10), [])  # its version is not known yet
    assert [(list(piece.token_ids), piece.version) for piece in told] == [
        ([5, 6], 0),
        ([7], 0),
        ([8, 9], 4),
    ]
    last = Delta([], Flat([]), "length", [VersionSpan("1:0", 0, 3), VersionSpan("2:4", 3, 6)])
    await telling.take(last, last.weight_versions)
    assert [(list(piece.token_ids), piece.version) for piece in told[3:]] == [([10], 4)]
    whole = telling.whole(last)
    assert (whole.token_ids, whole.logprobs.logprobs, whole.finish_reason) == (
        [5, 6, 7, 8, 9, 10],
        [-0.5] * 6,
        "length",
    )
    assert whole.weight_versions == last.weight_versions


async def test_tokens_of_new_weights_wait_for_their_probe_and_are_dropped_when_it_fails() -> None:
    told: list[TokenEvent] = []
    verdict: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def good(label: str) -> bool:
        return label == "1:0" or await verdict

    telling = CompletionStream(TokenListener(told.append), greedy=True, good=good)
    taking = asyncio.create_task(
        telling.take(delta(5, 6, 7), [VersionSpan("1:0", 0, 1), VersionSpan("2:4", 1, 3)])
    )
    await asyncio.sleep(0)
    assert [(list(piece.token_ids), list(piece.logprobs)) for piece in told] == [([5], [0.0])]
    verdict.set_result(False)
    await taking
    await telling.take(delta(8), [VersionSpan("1:0", 0, 1), VersionSpan("2:4", 1, 4)])
    assert len(told) == 1


async def test_what_is_not_finite_is_not_told() -> None:
    told: list[TokenEvent] = []
    telling = CompletionStream(TokenListener(told.append), greedy=False, good=right)
    await telling.take(delta(5, logprob=float("nan")), [VersionSpan("1:0", 0, 1)])
    await telling.take(delta(6), [VersionSpan("1:0", 0, 2)])
    assert told == []


async def test_the_likeliest_come_with_each_token() -> None:
    told: list[TokenEvent] = []
    telling = CompletionStream(TokenListener(told.append, 2), greedy=False, good=right)
    flat = Flat([-3.0, -0.1, -2.5, -0.2, -0.2, float("-inf")], [9, 4, 5, 4, 4, 7], 3)
    await telling.take(Delta([9, 4], flat), [VersionSpan("1:0", 0, 2)])
    assert [list(one) for one in told[0].top] == [[(4, -0.1), (5, -2.5)], [(4, -0.2)]]
    assert list(likeliest([1], [-1.0], 0)) == []
