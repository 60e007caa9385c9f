"""Builds the message of /v1/messages and its stream events (pure)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rlearner_text.anthropic.errors import error_body
from rlearner_text.anthropic.messages import MessagesBody, MessagesChat
from rlearner_text.openai import tool_calls
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter, runs_of, usage
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.partial_text import PartialText
from rlearner_text.openai.sse_chunks import partial_text_of
from rlearner_text.openai.token_events import TokenEvent
from rlearner_text.template_rules import opens_thinking
from rlearner_text.thinking import TextPiece, ThinkingSplitter, split_thinking
from rlearner_text.tokenizer import Tokenizer


class MessagesFormat:
    """Answer format of /v1/messages; see ``rlearner_text.openai.streaming.AnswerFormat``."""

    def __init__(
        self, body: MessagesBody, chat: MessagesChat, tokenizer: Tokenizer, writer: AnswerWriter
    ) -> None:
        self._body = body
        self._chat = chat
        self._tokenizer = tokenizer
        self._writer = writer
        self.idle_event = {"type": "ping"}
        # the signature of its reasoning, which is also how the ids of its calls begin
        self.signature = tool_calls.prefix_of(writer.reply_id, 0)
        self.opens_thinking = opens_thinking(tokenizer)
        self.shows_thinking = body.shows_thinking
        self.omits_thinking = body.omits_thinking

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        (choice,) = choices
        message = self.message(content=self.content(choice), usage=format_usage(choices))
        return message | self.ending_fields(choice) | self.token_fields(choice)

    def message(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        return {
            "id": f"msg_{self._writer.reply_id}",
            "type": "message",
            "role": "assistant",
            "model": self._writer.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def content(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Return the blocks of an answer: reasoning, text unless there are only calls, calls."""
        text, calls = self._writer.said(choice)
        reasoning, words = split_thinking(text, is_open=self.opens_thinking)
        blocks: list[dict[str, Any]] = []
        if reasoning and self.shows_thinking:
            thinking = "" if self.omits_thinking else reasoning
            blocks.append(self.start_of("thinking") | {"thinking": thinking})
            blocks[-1]["signature"] = self.signature
        if words or not calls:
            blocks.append(self.start_of("text") | {"text": words})
        return [*blocks, *map(_tool_use, calls)]

    def start_of(self, kind: str) -> dict[str, Any]:
        """Return a block of reasoning or text that is empty."""
        if kind == "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}
        return {"type": "text", "text": ""}

    def ending_fields(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return why the answer ended."""
        stop = None
        reason = "max_tokens"
        if self._writer.said(choice)[1]:
            reason = "tool_use"
        elif choice.reply.finish_reason == "stop":
            stop = self._find_stop(choice)
            reason = "end_turn"
            if stop is not None:
                reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}

    def token_fields(self, choice: AnswerChoice) -> dict[str, Any]:
        """Return tokens and policy versions, if the client wants them."""
        if not self._body.return_token_ids:
            return {}
        return {
            "prompt_token_ids": list(choice.prompt),
            "token_ids": choice.reply.token_ids.array().tolist(),
            "version_runs": runs_of(choice.reply),
            "policy_version": choice.reply.policy_version,
        }

    def events(self, index: int, prompt: Sequence[int]) -> MessageEvents:
        """Return the events of a stream."""
        return MessageEvents(self, partial_text_of(self._chat, self._tokenizer), len(prompt))

    def ending(self, choices: Sequence[AnswerChoice]) -> list[bytes]:
        """Return nothing: the last event marks the end of the stream."""
        return []

    def error(self, problem: HttpError) -> dict[str, Any]:
        return error_body(problem)

    def spoken(self, choice: AnswerChoice) -> str:
        """Return the whole text of an answer, without its calls."""
        return self._writer.said(choice)[0]

    def _find_stop(self, choice: AnswerChoice) -> str | None:
        """Return the stop sequence that ended an answer, None if its own end did."""
        ids = choice.reply.token_ids.array().tolist()
        if ids and ids[-1] in self._tokenizer.eos_token_ids:
            return None
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        places = {stop: text.find(stop) for stop in self._chat.stops if stop in text}
        return min(places, key=lambda stop: places[stop], default=None)


class MessageEvents:
    """The events of one streamed message; ``sse_chunks`` explains the timing of text.

    A call is sent once it is complete, with its arguments in one piece.
    """

    def __init__(self, answer: MessagesFormat, partial: PartialText, prompt_tokens: int) -> None:
        self._answer = answer
        self._partial = partial
        self._prompt_tokens = prompt_tokens
        self._splitter = ThinkingSplitter(is_open=answer.opens_thinking)
        self._has_begun = False
        self._index = -1
        # the block that has started and not stopped, if any
        self._open_kind = ""

    def of(self, pieces: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        """Return the events of new pieces."""
        text = self._partial.add([token for piece in pieces for token in piece.token_ids])
        return [*self._begin(), *self._text_events(self._splitter.add(text))]

    def last(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Return the events of the rest of a finished choice and of its end."""
        events = self._begin()
        rest = self._partial.rest(self._answer.spoken(choice))
        pieces = [*self._splitter.add(rest), *self._splitter.end()]
        events += self._text_events(pieces)
        content = self._answer.content(choice)
        # an empty text that no piece has begun
        if content[-1] == {"type": "text", "text": ""}:
            events += [*self._stop(), *self._start("text", self._answer.start_of("text"))]
        events += self._stop()
        for block in content:
            if block["type"] == "tool_use":
                events += self._call_events(block)
        ending = self._answer.ending_fields(choice)
        tokens = self._answer.token_fields(choice)
        return [
            *events,
            {"type": "message_delta", "delta": ending, "usage": format_usage([choice]), **tokens},
            {"type": "message_stop"},
        ]

    def _begin(self) -> list[dict[str, Any]]:
        if self._has_begun:
            return []
        self._has_begun = True
        message = self._answer.message([], usage_fields(self._prompt_tokens, 0, 0))
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _text_events(self, pieces: Sequence[TextPiece]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for kind, text in pieces:
            if kind == "thinking" and not self._answer.shows_thinking:
                continue
            if self._open_kind != kind:
                events += self._stop()
                events += self._start(kind, self._answer.start_of(kind))
            if kind == "text":
                events.append(self._delta({"type": "text_delta", "text": text}))
            elif not self._answer.omits_thinking:
                events.append(self._delta({"type": "thinking_delta", "thinking": text}))
        return events

    def _call_events(self, block: dict[str, Any]) -> list[dict[str, Any]]:
        arguments = json.dumps(block["input"])
        return [
            *self._start("tool_use", block | {"input": {}}),
            self._delta({"type": "input_json_delta", "partial_json": arguments}),
            *self._stop(),
        ]

    def _start(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        self._index += 1
        self._open_kind = kind
        return [{"type": "content_block_start", "index": self._index, "content_block": block}]

    def _stop(self) -> list[dict[str, Any]]:
        if not self._open_kind:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._open_kind == "thinking":
            signature = self._answer.signature
            events.insert(0, self._delta({"type": "signature_delta", "signature": signature}))
        self._open_kind = ""
        return events

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def usage_fields(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the usage of a message; cached tokens are not among the input tokens."""
    return {
        "input_tokens": prompt_tokens - cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": output_tokens,
    }


def format_usage(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Return the usage of an answer."""
    counts = usage(choices)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return usage_fields(counts["prompt_tokens"], cached, counts["completion_tokens"])


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    """Convert a chat's tool call to a block."""
    function = call["function"]
    arguments = json.loads(function["arguments"])
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}
