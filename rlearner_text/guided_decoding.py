"""Guided decoding: allowed next tokens, from JSON schemas and surrounding text (llguidance)."""

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

# The spacing of chat templates, and so what models have learned; flexible white space could
# continue forever.
_SPACING: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}

_SAMPLES: Final = ('{"name": "a b"}', "two words")


class GuideError(ValueError):
    """A guide that cannot be compiled to a grammar; the message is one line."""


class GuideCompiler:
    """Compiles the guides of one model; ``vocab_size`` is the width of its logits, None for the
    tokenizer's size.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size or tokenizer.vocab_size
        self._lock = threading.Lock()

    @cached_property
    def _own(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        file = tokenizer_folder(self._tokenizer.name) / "tokenizer.json"
        if not file.is_file():
            raise GuideError("guided answers need a model with a tokenizer.json")
        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise GuideError("guided answers need a model with an end token")
        try:
            return LLTokenizer(str(file), n_vocab=self._size, eos_token=ends)
        except ValueError:
            # It knows the decoders of bytes only, not of whole characters or words.
            spelled = TokenizerWrapper(SpelledTokens(self._tokenizer))
            return LLTokenizer(spelled, n_vocab=self._size, eos_token=ends)

    def check(self, guides: Sequence[wire.Guide]) -> None:
        """Check that guides can be compiled.

        Raises:
            GuideError: if they cannot be compiled to a grammar.
        """
        self.matcher(guides)

    def matcher(self, guides: Sequence[wire.Guide]) -> GuideMatcher:
        """Return a matcher for one answer, which must follow one of the guides.

        Raises:
            GuideError: if they cannot be compiled to a grammar.
        """
        from llguidance import LLMatcher

        grammar = self.grammar(guides)
        # Created once for all threads.
        with self._lock:
            own = self._own
        matcher = LLMatcher(own, grammar, log_level=0)
        if matcher.is_error():
            raise GuideError(_single_line(matcher.get_error()))
        return GuideMatcher(matcher, self._size)

    def grammar(self, guides: Sequence[wire.Guide]) -> str:
        """Return the guides in llguidance's variant of Lark.

        Raises:
            GuideError: if a schema is not a JSON object.
        """
        terms = [
            [*self._spelled(guide.before), f"value_{n}", *self._spelled(guide.after)]
            for n, guide in enumerate(guides)
        ]
        forms = [" ".join(term) for term in terms]
        values = [
            f"value_{n}: %json {self._schema(guide.schema)}" for n, guide in enumerate(guides)
        ]
        return "\n".join([f"start: {' | '.join(forms)}", *values, ""])

    def _schema(self, text: str) -> str:
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            raise GuideError("the schema is not valid JSON") from None
        if not isinstance(schema, dict):
            raise GuideError("the schema must be an object")
        return json.dumps(schema | {"x-guidance": _SPACING})

    def _spelled(self, text: str) -> list[str]:
        """Return a text as terms of a grammar; special tokens are written by id."""
        terms: list[str] = []
        plain: list[int] = []
        for token in self._tokenizer.encode(text):
            if self._tokenizer.decode([token]) or not self._tokenizer.decode(
                [token], skip_special_tokens=False
            ):
                plain.append(token)
                continue
            terms += [*self._literal(plain), f"<[{token}]>"]
            plain = []
        return terms + self._literal(plain)

    def _literal(self, ids: Sequence[int]) -> list[str]:
        return [json.dumps(self._tokenizer.decode(ids), ensure_ascii=False)] if ids else []


class SpelledTokens:
    """A tokenizer in the form that llguidance's ``TokenizerWrapper`` takes: the text of each token.

    Raises:
        GuideError: if a text is not the texts of its tokens one after the other.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token_ids[0]
        ids = range(tokenizer.vocab_size)
        self.special_token_ids = [token for token in ids if tokenizer.is_special(token)]
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
        self.tokens = [text.encode() for text in texts]
        for sample in _SAMPLES:
            if "".join(texts[token] for token in tokenizer.encode(sample)) != sample:
                raise GuideError(
                    "guided answers need a tokenizer whose tokens spell texts letter by letter"
                )

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(
            text.decode(errors="replace") if isinstance(text, bytes) else text
        )


class GuideMatcher:
    """Follows one answer through its guide.

    Attributes:
        complete: whether the answer may end here.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._size = vocab_size

    @property
    def complete(self) -> bool:
        return self._matcher.is_accepting()

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the tokens that may come next, (vocabulary,), end tokens included.

        Raises:
            GuideError: if the grammar grows too large.
        """
        bits: Any = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise GuideError(_single_line(self._matcher.get_error()))
        return np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)

    def take(self, token: int) -> bool:
        """Advance by a token and return whether it is allowed."""
        return self._matcher.consume_token(token)


def _single_line(error: str) -> str:
    """Return llguidance's error without the grammar that it quotes."""
    lines = [line.strip() for line in error.splitlines() if " | " not in line]
    message = " ".join(line for line in lines if not line.startswith("^"))
    return message.partition("failed to compile JSON schema: ")[2][:300] or message[:300]
