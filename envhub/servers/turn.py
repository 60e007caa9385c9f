"""One turn: what is requested, what was sampled, and the seeds of both."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from broker.contract import wire
from broker.errors import RlearnerError


class TurnFailed(RlearnerError):
    """No server completed the turn in time."""


class TurnRequest(msgspec.Struct, frozen=True):
    """One turn to sample.

    Attributes:
        episode: id of the ``EpisodeTask``, for ``TurnGenerator.hurry``.
        token_ids: the whole context; an array of 4-byte integers is the cheapest to send.
        sticky: id of the server that answered the conversation's last turn.
        timeout_s: for the whole turn, retries included.
        expected_tokens, expected_high: predicted length of the whole turn, see
            ``broker.contract.lengths``.
        priority: higher ones start first.
        step: training step that the turn's group is expected in, -1 unknown.
        scores_context: sample nothing; return the logprob of each context token but the first.
        top_k: with it, likeliest tokens to return at each of them.
    """

    conversation_id: str
    token_ids: Sequence[int]
    sampling: wire.SamplingParams
    episode: str = ""
    policy: str = wire.ACTOR
    min_version: int = 0
    sticky: str = ""
    timeout_s: float = 120.0
    expected_tokens: int = 0
    expected_high: int = 0
    priority: int = 0
    step: int = -1
    scores_context: bool = False
    top_k: int = 0


@dataclass
class SampledTurn:
    """One turn: k tokens, k logprobs, flat pairs (policy_version, number of tokens).

    Attributes:
        reshaped: k bytes, 1 where a token was drawn from a reshaped distribution; empty: none was.
        top: the likeliest tokens at each position with their logprobs; empty if not requested or
            not supported.
        scored: the reply to a request that scored its context.
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    version_runs: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: wire.FinishReason = "stop"
    server: str = ""
    reshaped: bytes = b""
    top: Sequence[Sequence[tuple[int, float]]] = ()
    scored: wire.GenerateReply | None = None

    @classmethod
    def of(
        cls,
        ids: Iterable[int],
        logprobs: Iterable[float],
        runs: Iterable[int],
        reason: wire.FinishReason,
        server: str,
    ) -> SampledTurn:
        """Return a turn made from any sequences."""
        return cls(array("i", ids), array("f", logprobs), array("i", runs), reason, server)

    def extend(self, reply: wire.GenerateReply) -> None:
        """Add what a reply has after the tokens so far.

        The columns for reshaped and likeliest tokens are the reply's: a turn that has them is one
        reply (``SamplingParams.is_resumable``).
        """
        self.token_ids += wire.growable_array(reply.token_ids)
        self.logprobs += wire.growable_array(reply.logprobs)
        self.version_runs += wire.growable_array(reply.version_runs)
        self.finish_reason = reply.finish_reason
        self.server = reply.server
        self.reshaped = reply.reshaped.data if reply.reshaped is not None else b""
        self.top = _top_tokens(reply)
        self.scored = reply if reply.prompt_logprobs is not None else None


def scores_problem(ask: TurnRequest, reply: wire.GenerateReply) -> str:
    """Return why a reply does not have the scores that were requested; empty if it has."""
    count = len(ask.token_ids) - 1
    columns = {"logprobs": (reply.prompt_logprobs, count)}
    if ask.top_k:
        columns["likeliest tokens"] = (reply.top_ids, count * ask.top_k)
    for name, (column, expected) in columns.items():
        num_values = 0 if column is None else len(column.data) // 4
        if num_values != expected:
            return f"returned {num_values} {name} of the context, expected {expected}"
    return ""


def mix(*values: int) -> int:
    """Return a 48-bit seed made of other seeds and counters (splitmix64)."""
    return stirred(0, *values) >> 16


def stirred(mixed: int, *values: int) -> int:
    """Return all 64 bits of ``mix``, which can be extended.

    ``mix(a, b) == stirred(stirred(0, a), b) >> 16``.
    """
    for value in values:
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed


def _top_tokens(reply: wire.GenerateReply) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens at each position, without the repeated ones that fill a row."""
    count = len(reply.token_ids.data) // 4
    if reply.top_ids is None or reply.top_logprobs is None or not count:
        return []
    ids, logprobs = (
        column.array().reshape(count, -1).tolist() for column in (reply.top_ids, reply.top_logprobs)
    )
    return [list(dict(zip(*row, strict=True)).items()) for row in zip(ids, logprobs, strict=True)]
