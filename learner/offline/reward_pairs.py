"""Tokens of preference pairs for a reward model, which reads whole conversations."""

from __future__ import annotations

from learner.backends.reward import scored_sample
from learner.offline.data import SupervisedDialogue, TokenizedExample
from learner.offline.preference import SamplePair
from learner.offline.preference_pairs import PreferencePair
from rlearner_text.scored_text import encode_scored
from rlearner_text.tokenizer import Tokenizer


def encode_whole(dialogue: SupervisedDialogue, tokenizer: Tokenizer) -> TokenizedExample:
    """Return the tokens of a conversation as reward hubs encode it, none of them masked.

    Padding tokens at its end are left out: transformers takes the last other token of a row for
    the end of the conversation, where the pad token also closes turns.

    Raises:
        ConfigError: if the chat template rejects the messages.
    """
    token_ids = encode_scored(tokenizer, dialogue.messages, dialogue.tools)
    while len(token_ids) > 1 and token_ids[-1] == tokenizer.pad_token_id:
        token_ids.pop()
    return TokenizedExample(token_ids, [0] * len(token_ids))


def sample_pair(pair: PreferencePair) -> SamplePair:
    """Return the samples by which both conversations are scored."""
    return scored_sample(pair.chosen.token_ids), scored_sample(pair.rejected.token_ids)
