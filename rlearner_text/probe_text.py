"""Makes the text by which processes compare logprobs: ordinary, and past every switch.

A window, a chunk or a second set of rotary factors takes effect only beyond a number of tokens that
the configuration names. A comparison on fewer tokens says nothing about it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from rlearner_text.hub import ModelConfig
from rlearner_text.tokenizer import Tokenizer

# Tokens; past the chunks of 64 in which kernels of linear attention compute.
SHORTEST: Final = 72
MARGIN: Final = 32  # tokens past the last switch
# Different tokens; attention to equal tokens is alike, whatever it sees.
FEWEST: Final = 12

# Settings whose value is a number of tokens at which attention or a recurrent kernel changes.
_SWITCH: Final = re.compile(r"window|chunk|local_attention|floor_scale|index_topk$")
_NO_LENGTH: Final = re.compile(r"layers|pattern|num_|use_|ratio|_ff|feed_forward|loss|mlp")
_ORIGINAL: Final = "original_max_position_embeddings"
# the others compute alike at any length
_CHANGING_ROPES: Final = frozenset({"longrope", "su", "dynamic"})

_SUBJECTS: Final = (
    "The baker", "A young engineer", "My neighbour", "The captain", "An old teacher",
    "The committee", "Her brother",
    "The gardener", "Our doctor", "A tired traveller", "The mayor", "The second violinist",
    "A careful reader",
)  # fmt: skip
_VERBS: Final = (
    "counted", "repaired", "described", "forgot about", "painted", "carried home", "sold",
    "wrote down", "measured",
    "looked for", "found", "borrowed", "photographed", "asked about", "paid for", "explained",
    "weighed",
)  # fmt: skip
_OBJECTS: Final = (
    "wooden chairs", "letters from the archive", "red apples", "broken clocks", "maps of the coast",
    "warm coats",
    "bottles of ink", "short stories", "bicycles", "train tickets", "jars of honey", "glass lamps",
    "garden tools",
    "pairs of shoes", "loaves of bread", "old coins", "notebooks", "silver spoons",
    "packets of seeds",
)  # fmt: skip
_PLACES: Final = (
    "near the harbour", "in the library", "behind the station", "at the market", "across the river",
    "on the hill",
    "in a small village", "under the bridge", "behind the school", "at the edge of the forest",
    "in the kitchen",
)  # fmt: skip
_ENDINGS: Final = (
    "because winter was early.", "before anyone noticed.", "and the price was fair.",
    "while it was raining.",
    "which surprised nobody.", "although the road was closed.", "so the meeting ended at noon.",
)  # fmt: skip


def switch_lengths(model_config: ModelConfig) -> tuple[int, ...]:
    """Return the lengths in tokens beyond which a model computes otherwise, ascending.

    Args:
        model_config: of the text model with the defaults of its class:
            ``config.get_text_config().to_dict()``.
    """
    return tuple(sorted(set(_find_switches(model_config))))


def _find_switches(settings: ModelConfig) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _find_switches(value)
        elif not isinstance(value, int) or isinstance(value, bool) or value < 2:
            continue
        elif name == _ORIGINAL:
            if _rope_types(settings) & _CHANGING_ROPES or "llama_4_scaling_beta" in settings:
                yield value
        elif "sliding_window" in name and settings.get("use_sliding_window") is False:
            continue
        elif _SWITCH.search(name) and not _NO_LENGTH.search(name):
            yield value


def _rope_types(settings: ModelConfig) -> set[str]:
    """Return the kinds of rotary positions at a level of a configuration."""
    levels = [settings, *(value for value in settings.values() if isinstance(value, Mapping))]
    return {str(level.get("rope_type", level.get("type"))) for level in levels}


def probe_length(model_config: ModelConfig, max_context: int) -> int:
    """Return the tokens that pass every switch within the run's context, and leave room for one."""
    reached = [
        switch + MARGIN for switch in switch_lengths(model_config) if switch < max_context - 1
    ]
    return max(2, min(max([SHORTEST, *reached]), max_context - 1))


def probe_tokens(
    tokenizer: Tokenizer | None,
    model_config: ModelConfig,
    *,
    vocab_size: int,
    max_context: int,
    start: int = 0,
) -> list[int]:
    """Return ids of ordinary text, past every switch of the model that ``max_context`` reaches.

    Args:
        tokenizer: the model's; None: ids spread over the vocabulary.
        model_config: as for ``switch_lengths``.
        vocab_size: rows of the model's embedding; a tokenizer may have more.
        max_context: rollout.max_context_tokens.
        start: number of the first sentence, for another text.
    """
    length = probe_length(model_config, max_context)
    ids: list[int] = []
    if tokenizer is not None:
        sentences = _make_sentences(start)
        while len(ids) < length:
            paragraph = " ".join(itertools.islice(sentences, 8)) + "\n"
            piece = [token for token in tokenizer.encode(paragraph) if token < vocab_size]
            if not piece:
                break
            ids += piece
    # No tokenizer, or one that knows no letters.
    if len(ids) < length or len(set(ids)) < FEWEST:
        ids = np.random.default_rng(start).integers(0, vocab_size, length).tolist()
    return ids[:length]


def _make_sentences(start: int) -> Iterator[str]:
    """Yield sentences without end.

    The factors share no divisor with the numbers of words, so combinations repeat late.
    """
    for n in itertools.count(start):
        subject = _SUBJECTS[n * 5 % len(_SUBJECTS)]
        verb = _VERBS[n * 7 % len(_VERBS)]
        thing = _OBJECTS[n * 4 % len(_OBJECTS)]
        place = _PLACES[n * 3 % len(_PLACES)]
        ending = _ENDINGS[n * 2 % len(_ENDINGS)]
        yield f"{subject} {verb} {n * 37 % 89 + 2} {thing} {place} {ending}"
