"""Guides of models whose tokenizer has no bytes: the vocabulary of characters that a run makes
itself.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from broker.contract import wire
from rlearner_text.config import TinyModel
from rlearner_text.guided_decoding import GuideCompiler, GuideError
from rlearner_text.tiny import _write_tokenizer
from rlearner_text.tokenizer import Tokenizer

SCHEMA = json.dumps(
    {"type": "object", "properties": {"to": {"type": "integer"}}, "required": ["to"]}
)


def test_a_vocabulary_of_characters_is_guided(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path, TinyModel(words=["move"]))
    tokenizer = Tokenizer.load(tmp_path)
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size + 7)
    matcher = compiler.matcher([wire.Guide(schema=SCHEMA)])
    text = '{"to": 7}'
    for token in tokenizer.encode(text):
        allowed = matcher.allowed()
        assert allowed.shape == (tokenizer.vocab_size + 7,)
        assert allowed[token]
        assert not allowed[tokenizer.vocab_size :].any()
        assert matcher.take(token)
    assert matcher.complete
    assert matcher.allowed()[tokenizer.eos_token_ids[0]]
    (opening,) = GuideCompiler(tokenizer).matcher([wire.Guide(schema=SCHEMA)]).allowed().nonzero()
    assert tokenizer.decode(opening.tolist()) == "{"


def test_words_without_spaces_are_refused(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "two": 1, "words": 2, "[UNK]": 3}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    with pytest.raises(GuideError, match="tokens spell texts letter by letter"):
        GuideCompiler(Tokenizer.load(tmp_path)).check([wire.Guide(schema=SCHEMA)])
