"""Finds the answers of an episode again in the messages that its agent sends back.

Agents send text and calls, and the policy must be trained on the tokens that it sampled. So an
answer that came back unchanged is rendered with the very text that was sampled. The ids of its
calls say which answer it is, the signature of its reasoning does, or the conversation before it:
clients of Anthropic's protocol send answers back without the reasoning.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlearner_text.anthropic.content_blocks import AssistantMessage
from rlearner_text.anthropic.messages import MessagesChat
from rlearner_text.openai import tool_calls
from rlearner_text.openai.answers import before_stop
from rlearner_text.openai.generation import REPLY_ID_CHARS
from rlearner_text.openai.request_bodies import ChatBody, ChatMessage, MessageToolCall
from rlearner_text.template_rules import channel_reader, opens_thinking
from rlearner_text.thinking import split_thinking
from rlearner_text.tokenizer import Tokenizer

_PREFIX_CHARS: Final = len(tool_calls.prefix_of("x" * REPLY_ID_CHARS, 0))


@dataclass(frozen=True)
class SampledAnswer:
    """An answer.

    Attributes:
        text: with special tokens, as it was sampled, without its end token.
        prefix: how the ids of its calls begin; the signature of its reasoning.
        spoken: the text that a client sees if there are no calls, reasoning included.
    """

    text: str
    prefix: str
    spoken: str


class SampledAnswers:
    """The answers of one episode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._by_prefix: dict[str, SampledAnswer] = {}
        # by the messages before it and what was said, without reasoning
        self._by_place: dict[tuple[bytes, str], SampledAnswer] = {}
        # digest of the messages by that of the prompt's tokens
        self._openings: dict[bytes, bytes] = {}

    def add_prompt(self, token_ids: Sequence[int], body: ChatBody) -> None:
        """Note the messages of a prompt, which will be answered."""
        if isinstance(body, MessagesChat):
            *_, digest = _digest_openings(body.messages)
            self._openings[_digest_tokens(token_ids)] = digest

    def add_answer(
        self, prefix: str, prompt: Sequence[int], token_ids: Sequence[int], stops: Sequence[str]
    ) -> None:
        """Note an answer.

        Args:
            prefix: how the ids of its calls begin.
            prompt: tokens of its prompt.
            token_ids: tokens of the answer, with its end token.
            stops: strings that end it; clients see the text before them.
        """
        text = tool_calls.text_with_markers(self._tokenizer, token_ids)
        spoken = before_stop(self._visible_text(token_ids), stops)
        answer = SampledAnswer(text, prefix, spoken)
        self._by_prefix[prefix] = answer
        opening = self._openings.get(_digest_tokens(prompt))
        if opening is not None:
            self._by_place[opening, self._without_reasoning(spoken)] = answer

    def find_texts(self, body: ChatBody) -> dict[int, str]:
        """Return the sampled texts of a chat's answers by the places of their messages."""
        texts: dict[int, str] = {}
        openings: Iterator[bytes] | None = None
        if isinstance(body, MessagesChat):
            openings = _digest_openings(body.messages)
        for place, message in enumerate(body.messages):
            opening = next(openings) if openings is not None else b""
            answer = self._find_answer(message, opening, body.most_calls)
            if answer is not None:
                texts[place] = answer.text
        return texts

    def _find_answer(
        self, message: ChatMessage, opening: bytes, most_calls: int | None
    ) -> SampledAnswer | None:
        if message.role != "assistant":
            return None
        answer = self._by_prefix.get(_prefix_of(message))
        if answer is not None and self._repeats(message, answer, most_calls):
            return answer
        if isinstance(message, AssistantMessage) and not message.tool_calls:
            answer = self._by_place.get((opening, message.text.strip()))
            if answer is not None and self._has_reasoning(message, answer.spoken):
                return answer
        return None

    def _repeats(self, message: ChatMessage, answer: SampledAnswer, most_calls: int | None) -> bool:
        """Return whether a message says the same as an answer."""
        words = answer.spoken
        if message.tool_calls:
            syntax = tool_calls.tool_syntax(self._tokenizer)
            words, calls = tool_calls.split_calls(answer.text, syntax, answer.prefix, most_calls)
            if not _are_same_calls(message.tool_calls, calls):
                return False
        is_apart = isinstance(message, AssistantMessage) or message.reasoning_content is not None
        if not is_apart:
            return words == message.text
        is_same = self._without_reasoning(words) == message.text.strip()
        return is_same and self._has_reasoning(message, words)

    def _has_reasoning(self, message: ChatMessage, text: str) -> bool:
        """Return whether the reasoning of a message, if it has any, is that of a text."""
        reasoning, _ = split_thinking(text, is_open=opens_thinking(self._tokenizer))
        if isinstance(message, AssistantMessage):
            own_reasoning = message.thinking
        else:
            own_reasoning = message.reasoning_content or ""
        return own_reasoning.strip() in ("", reasoning.strip())

    def _without_reasoning(self, text: str) -> str:
        _, words = split_thinking(text, is_open=opens_thinking(self._tokenizer))
        return words.strip()

    def _visible_text(self, token_ids: Sequence[int]) -> str:
        ids = list(token_ids)
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            del ids[-1]
        reader = channel_reader(self._tokenizer)
        if reader is None:
            return self._tokenizer.decode(ids)
        return reader.text(ids)


def _prefix_of(message: ChatMessage) -> str:
    """Return how the ids of the calls of a message's answer begin; empty if it does not say."""
    if isinstance(message, AssistantMessage) and message.signature:
        return message.signature
    if not message.tool_calls:
        return ""
    return message.tool_calls[0].id[:_PREFIX_CHARS]


def _are_same_calls(calls: Sequence[MessageToolCall], sampled: Sequence[dict[str, Any]]) -> bool:
    """Return whether calls are the sampled ones; clients may write their arguments differently."""
    if len(calls) != len(sampled):
        return False
    return all(
        (call.id, call.function.name) == (other["id"], other["function"]["name"])
        and _canonical_json(call.function.arguments)
        == _canonical_json(other["function"]["arguments"])
        for call, other in zip(calls, sampled, strict=True)
    )


def _canonical_json(text: str) -> str:
    """Return JSON in one spelling: JavaScript knows no difference between 1 and 1.0."""
    return json.dumps(json.loads(text, parse_float=_read_float), sort_keys=True)


def _read_float(digits: str) -> float | int:
    value = float(digits)
    if value.is_integer():
        return int(value)
    return value


def _digest_openings(messages: Sequence[ChatMessage]) -> Iterator[bytes]:
    """Yield a digest of the messages before each message, then of all; reasoning does not count."""
    state = hashlib.sha256()
    for message in messages:
        yield state.digest()
        plain = message.plain()
        if isinstance(message, AssistantMessage):
            plain = message.spoken()
        state.update(json.dumps(plain).encode())
    yield state.digest()


def _digest_tokens(token_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(array("i", token_ids).tobytes()).digest()
