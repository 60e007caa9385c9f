"""Splits a rendered conversation back into messages, for endpoints that accept only those (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from broker.errors import ConfigError
from rlearner_text.chat_template import Chat

_SYSTEM = "probe system 9173"
_FIRST = "probe question 1213"
_ANSWER = "probe answer 7561"
_SECOND = "probe question 4137"


class TurnSplitter:
    """Splits at the text that a chat template puts between turns, which it learns by rendering
    known words.

    Args:
        render: renders messages to text, generation prompt included.

    Raises:
        ConfigError: if the template changes or omits these words.
    """

    def __init__(self, render: Callable[[Chat], str]) -> None:
        talk = render([_says("user", _FIRST), _says("assistant", _ANSWER), _says("user", _SECOND)])
        opening, to_answer, to_user, self._prompt = _between(talk, (_FIRST, _ANSWER, _SECOND))
        # Sampled text follows the generation prompt, which may have more than a finished turn, such
        # as a thinking tag.
        self._to_answer = sorted({to_answer, self._prompt}, key=len, reverse=True)
        self._to_user = to_user
        self._openings = [(opening, "")]
        try:
            text_before, text_after, _ = _between(
                render([_says("system", _SYSTEM), _says("user", _FIRST)]), (_SYSTEM, _FIRST)
            )
            self._openings.append((text_before, text_after))
        except ConfigError:
            pass  # no system messages in this template
        # one may be a prefix of the other
        self._openings.sort(key=lambda pair: len(pair[0]), reverse=True)

    def split(self, text: str) -> list[dict[str, str]] | None:
        """Return the messages of a conversation that ends with the generation prompt, None if the
        text is not one.
        """
        if not text.endswith(self._prompt):
            return None
        body = text.removesuffix(self._prompt)
        for opening, after_system in self._openings:
            if not body.startswith(opening):
                continue
            remainder = body.removeprefix(opening)
            if not after_system:
                return self._turns(remainder)
            system, separator, remainder = remainder.partition(after_system)
            if separator:
                return [_says("system", system), *self._turns(remainder)]
        return None

    def _turns(self, text: str) -> list[dict[str, str]]:
        """Return alternating user and assistant messages."""
        messages: list[dict[str, str]] = []
        role = "user"
        marks = self._to_answer
        while (cut := _first(text, marks)) is not None:
            at, length = cut
            messages.append(_says(role, text[:at]))
            text = text[at + length :]
            role, marks = (
                ("assistant", [self._to_user]) if role == "user" else ("user", self._to_answer)
            )
        return [*messages, _says(role, text)]


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _first(text: str, marks: Sequence[str]) -> tuple[int, int] | None:
    """Return position and length of the first mark found, None if there is none; ties go to the
    mark listed first.
    """
    positions = [
        (at, order, len(mark)) for order, mark in enumerate(marks) if (at := text.find(mark)) >= 0
    ]
    return (min(positions)[0], min(positions)[2]) if positions else None


def _between(text: str, words: Sequence[str]) -> list[str]:
    """Return the text before, between and after words that occur once each, in this order."""
    pieces = []
    for word in words:
        text_before, separator, text = text.partition(word)
        if not separator:
            allowed = "the model's chat template does not render every turn; use completions"
            raise ConfigError("rollout.engine_args.api", "chat", allowed)
        pieces.append(text_before)
    return [*pieces, text]
