"""Builds OpenAI's stream chunks from the pieces that an engine streams (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlearner_text.openai import tool_calls
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter, runs_of, usage
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.partial_text import PartialText
from rlearner_text.openai.request_bodies import ChatBody, GenerationBody
from rlearner_text.openai.streaming import encode
from rlearner_text.openai.token_events import TokenEvent, TopLogprobs
from rlearner_text.template_rules import channel_reader
from rlearner_text.tokenizer import Tokenizer


class ChunkEvents:
    """The chunks of one choice.

    Every token is in exactly one chunk, with its logprob and version. Its text may follow a few
    tokens later, see ``PartialText``.

    Attributes:
        top: likeliest tokens at every position so far, see ``rlearner_text.openai.token_events``.
    """

    def __init__(
        self,
        body: GenerationBody,
        tokenizer: Tokenizer,
        writer: AnswerWriter,
        index: int,
        prompt: Sequence[int],
    ) -> None:
        self._body = body
        self._writer = writer
        self._index = index
        self._prompt = prompt
        self._chat = isinstance(body, ChatBody)
        self._spoken = partial_text_of(body, tokenizer)
        self._told = self._offset = 0
        self._begun = False
        self.top: list[TopLogprobs] = []

    def of(self, pieces: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        """Return one chunk with the new pieces."""
        ids = [entry for piece in pieces for entry in piece.token_ids]
        logprobs = [entry for piece in pieces for entry in piece.logprobs]
        top = [entry for piece in pieces for entry in piece.top]
        runs: list[list[int]] = []
        for piece in pieces:
            if runs and runs[-1][0] == piece.version:
                runs[-1][1] += len(piece.token_ids)
            else:
                runs.append([piece.version, len(piece.token_ids)])
        self.top += top
        return [self._chunk(self._spoken.add(ids), ids, logprobs, runs, top)]

    def last(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Return the chunks of the rest of a finished choice and of its end."""
        text, calls = self._writer.said(choice)
        ids = choice.reply.token_ids.array().tolist()[self._told :]
        logprobs = choice.reply.logprobs.array().tolist()[self._told :]
        remainder = self._spoken.rest(text)
        chunks = []
        if ids or remainder or not self._begun:
            chunks.append(
                self._chunk(
                    remainder, ids, logprobs, _text_behind(runs_of(choice.reply), self._told), ()
                )
            )
        if calls:
            chunks.append(
                self._object(
                    {
                        "delta": {
                            "tool_calls": [{"index": n} | chunk for n, chunk in enumerate(calls)]
                        }
                    }
                )
            )
        end: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        chunks.append(
            self._object(
                end | {"finish_reason": "tool_calls" if calls else choice.reply.finish_reason}
            )
        )
        for chunk in chunks:
            chunk["policy_version"] = choice.reply.policy_version
        return chunks

    def _chunk(
        self,
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        runs: list[list[int]],
        top: Sequence[TopLogprobs],
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text} if not self._chat else {"delta": {"content": text}}
        if self._chat and not self._begun:
            content["delta"] = {"role": "assistant", "content": text}
        content["logprobs"] = self._writer.logprobs(ids, logprobs, top, self._offset)
        if not self._chat and content["logprobs"] is not None:
            self._offset += sum(map(len, content["logprobs"]["tokens"]))
        content["version_runs"] = runs
        first: dict[str, Any] = {}
        if self._body.return_token_ids:
            content["token_ids"] = list(ids)
            if not self._begun:
                (first if self._chat else content)["prompt_token_ids"] = list(self._prompt)
        self._told += len(ids)
        self._begun = True
        chunk = self._object(content) | first
        return chunk | ({"policy_version": runs[-1][0]} if runs else {})

    def _object(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return self._writer.object(
            kind, [{"index": self._index, "logprobs": None, "finish_reason": None} | choice]
        )


def partial_text_of(body: GenerationBody, tokenizer: Tokenizer) -> PartialText:
    """Return the incremental text of an answer to a request."""
    opener = (
        tool_calls.tool_syntax(tokenizer).opener
        if isinstance(body, ChatBody) and body.offered
        else None
    )
    if isinstance(body, ChatBody) and channel_reader(tokenizer) is not None:
        opener = ""  # which channel is the answer's shows only at the end
    ends = frozenset((*body.stop_token_ids, *tokenizer.eos_token_ids))
    return PartialText(tokenizer, ends=ends, stops=body.stops, opener=opener)


def usage_chunk(
    writer: AnswerWriter, body: GenerationBody, choices: Sequence[AnswerChoice]
) -> dict[str, Any]:
    """Return the chunk that ``stream_options.include_usage`` requests."""
    kind = "chat.completion.chunk" if isinstance(body, ChatBody) else "text_completion"
    return writer.object(kind, []) | {"usage": usage(choices)}


class ChatFormat:
    """Answer format of chats and completions; see ``streaming.AnswerFormat``."""

    idle_event = None

    def __init__(self, body: GenerationBody, tokenizer: Tokenizer, writer: AnswerWriter) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._writer = writer
        self.whole = writer.whole

    def events(self, index: int, prompt: Sequence[int]) -> ChunkEvents:
        return ChunkEvents(self._body, self._tokenizer, self._writer, index, prompt)

    def ending(self, choices: Sequence[AnswerChoice]) -> list[bytes]:
        if not self._body.stream_options.include_usage:
            return [b"[DONE]"]
        return [encode(usage_chunk(self._writer, self._body, choices)), b"[DONE]"]

    def error(self, problem: HttpError) -> dict[str, Any]:
        return problem.body


def _text_behind(runs: Sequence[Sequence[int]], num_sent: int) -> list[list[int]]:
    """Return runs of tokens without the first ``num_sent`` tokens."""
    tails: list[list[int]] = []
    for version, count in runs:
        num_skipped = max(0, count - num_sent)
        num_sent = max(0, num_sent - count)
        if num_skipped:
            tails.append([version, num_skipped])
    return tails
