"""Answers that must keep to a form: which tokens may come next, from a JSON schema and the texts around its value (llguidance)."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from broker.contract import wire
from rlearner_text.hub import tokenizer_folder
from rlearner_text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# As chat templates write JSON, and so what models have learned to write; free white space could go on for ever.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}


class BadGuide(ValueError):
    """No grammar can be made of a guide; says why in one line."""


class Guides:
    """The guides of one model.

    Args:
        tokenizer: of the model; must have been loaded from a folder with a tokenizer.json.
        vocab_size: width of the model's logits; None: the tokenizer's own size.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size or tokenizer.vocab_size
        self._lock = threading.Lock()

    @cached_property
    def _own(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        file = tokenizer_folder(self._tokenizer.name) / "tokenizer.json"
        if not file.is_file():
            raise BadGuide("answers of a given form need a model whose tokenizer is a tokenizer.json")
        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise BadGuide("answers of a given form need a model with an end token")
        return LLTokenizer(str(file), n_vocab=self._size, eos_token=ends)

    def check(self, guides: Sequence[wire.Guide]) -> None:
        """Refuse what no grammar can be made of.

        Raises:
            BadGuide: says why.
        """
        self.matcher(guides)

    def matcher(self, guides: Sequence[wire.Guide]) -> Matcher:
        """Follow one answer, which keeps to one of the guides.

        Raises:
            BadGuide: no grammar can be made of them.
        """
        from llguidance import LLMatcher

        grammar = self.grammar(guides)
        with self._lock:  # made once, whatever threads ask
            own = self._own
        matcher = LLMatcher(own, grammar, log_level=0)
        if matcher.is_error():
            raise BadGuide(_line(matcher.get_error()))
        return Matcher(matcher, self._size)

    def grammar(self, guides: Sequence[wire.Guide]) -> str:
        """The guides in llguidance's variant of Lark.

        Raises:
            BadGuide: a schema is no JSON object.
        """
        forms = [" ".join([*self._spelled(one.before), f"value_{n}", *self._spelled(one.after)]) for n, one in enumerate(guides)]
        values = [f"value_{n}: %json {self._schema(one.schema)}" for n, one in enumerate(guides)]
        return "\n".join([f"start: {' | '.join(forms)}", *values, ""])

    def _schema(self, given: str) -> str:
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError):
            raise BadGuide("the schema is no JSON") from None
        if not isinstance(schema, dict):
            raise BadGuide("the schema must be an object")
        return json.dumps(schema | {"x-guidance": _SPACING})

    def _spelled(self, text: str) -> list[str]:
        """A text as terms of a grammar: special tokens are known by their ids alone."""
        terms: list[str] = []
        plain: list[int] = []
        for token in self._tokenizer.encode(text):
            if self._tokenizer.decode([token]) or not self._tokenizer.decode([token], skip_special_tokens=False):
                plain.append(token)
                continue
            terms += [*self._literal(plain), f"<[{token}]>"]
            plain = []
        return terms + self._literal(plain)

    def _literal(self, ids: Sequence[int]) -> list[str]:
        return [json.dumps(self._tokenizer.decode(ids), ensure_ascii=False)] if ids else []


class Matcher:
    """Follows one answer through its guide.

    Attributes:
        complete: whether the answer may end here.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher, self._size = matcher, vocab_size

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens may come next, (vocabulary,); the model's end tokens where the answer may end.

        Raises:
            BadGuide: the grammar turned out too large.
        """
        bits: Any = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise BadGuide(_line(self._matcher.get_error()))
        return np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)

    def take(self, token: int) -> bool:
        """Go on behind a token; whether it was allowed."""
        return self._matcher.consume_token(token)


def _line(error: str) -> str:
    """What llguidance says, without the grammar that it quotes."""
    said = " ".join(line.strip() for line in error.splitlines() if " | " not in line and not line.strip().startswith("^"))
    return said.partition("failed to compile JSON schema: ")[2][:300] or said[:300]
