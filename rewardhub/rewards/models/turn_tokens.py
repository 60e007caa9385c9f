"""Tokens of an episode for language models that score them, as ``rlearner dpo`` trains answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rewardhub.rewards.base import NoScore, Sample
from rewardhub.rewards.models.episode_text import read_episode
from rlearner_text.rows.messages import check_messages
from rlearner_text.supervised_masks import encode_supervised
from rlearner_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TurnTokens:
    """An episode in tokens.

    Attributes:
        token_ids: all of them.
        spans: (start, end) of each turn of the policy, with the tokens that end it.
    """

    token_ids: list[int]
    spans: list[tuple[int, int]]


def encode_turns(
    tokenizer: Tokenizer, sample: Sample, system_prompt: str | None = None
) -> TurnTokens:
    """Return the tokens of an episode; special tokens that its texts spell out are plain text.

    Raises:
        NoScore: if its messages are not there, or are no conversation by turns.
        ConfigError: if the chat template rejects them.
    """
    episode = read_episode(sample, system_prompt)
    where = f"domain {sample.domain!r}, task {sample.task_index}"
    messages = []
    for index, message in enumerate(episode.messages):
        kept = {"role": message["role"], "content": str(message["content"])}
        if index in episode.turns:
            # Users' texts are shielded where they are encoded.
            kept["content"] = tokenizer.shield(kept["content"])
        elif message["role"] == "assistant":
            kept["weight"] = 0
        messages.append(kept)
    try:
        token_ids, mask = encode_supervised(tokenizer, check_messages(messages))
    except ValueError as error:
        raise NoScore(f"{where}: {error}") from None
    spans = _spans_of(mask)
    if len(spans) != len(episode.turns):
        raise NoScore(f"{where}: {len(spans)} of its {len(episode.turns)} turns have tokens")
    return TurnTokens(token_ids, spans)


def _spans_of(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of ones."""
    spans = []
    start = 0
    for value, run in groupby(mask):
        end = start + len(list(run))
        if value:
            spans.append((start, end))
        start = end
    return spans
