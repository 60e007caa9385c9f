"""Builds OpenAI's answer objects, extended by token ids and policy versions (pure)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from broker.contract import wire
from rlearner_text.openai import tool_calls
from rlearner_text.openai.request_bodies import ChatBody, GenerationBody
from rlearner_text.openai.token_events import TopLogprobs
from rlearner_text.template_rules import channel_reader
from rlearner_text.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerChoice:
    """One answer to one prompt.

    Attributes:
        index: among the choices of the request.
        prompt: token ids.
        reply: the engine's reply.
        top: likeliest tokens at each position; empty if not requested.
    """

    index: int
    prompt: Sequence[int]
    reply: wire.GenerateReply
    top: Sequence[TopLogprobs] = ()


class AnswerWriter:
    """Writes the answers to one request; ``reply_id`` is the answer's id without prefix."""

    def __init__(
        self, body: GenerationBody, tokenizer: Tokenizer, model: str, reply_id: str
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self.model = model
        self._chat = isinstance(body, ChatBody)
        self.reply_id = reply_id
        self._id = ("chatcmpl-" if self._chat else "cmpl-") + reply_id
        self.created = int(time.time())

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        kind = "chat.completion" if self._chat else "text_completion"
        answer = self.object(kind, [self._choice(choice) for choice in choices])
        # a chat has one prompt; a completion's are in its choices
        if self._chat and self._body.return_token_ids:
            answer["prompt_token_ids"] = list(choices[0].prompt)
        return answer | {"usage": usage(choices), "policy_version": newest(choices)}

    def object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields that whole answers and stream events share."""
        return {
            "id": self._id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _choice(self, choice: AnswerChoice) -> dict[str, Any]:
        ids = choice.reply.token_ids.array().tolist()
        text, calls = self.said(choice)
        entry: dict[str, Any] = {"index": choice.index, "finish_reason": choice.reply.finish_reason}
        entry["version_runs"] = runs_of(choice.reply)
        entry["logprobs"] = self.logprobs(ids, choice.reply.logprobs.array().tolist(), choice.top)
        if self._chat:
            entry["message"] = {"role": "assistant", "content": text}
            if calls:
                entry["message"] |= {"tool_calls": calls, "content": text or None}
                entry["finish_reason"] = "tool_calls"
        else:
            entry["text"] = text
        if self._body.return_token_ids:
            entry["token_ids"] = ids
            if not self._chat:
                entry["prompt_token_ids"] = list(choice.prompt)
        return entry

    def said(self, choice: AnswerChoice) -> tuple[str, list[dict[str, Any]]]:
        """Return text and tool calls of a finished choice."""
        ids = choice.reply.token_ids.array().tolist()
        reason = choice.reply.finish_reason
        if isinstance(self._body, ChatBody) and self._body.offered and reason in ("stop", "length"):
            spelled = tool_calls.tool_syntax(self._tokenizer)
            prefix = tool_calls.prefix_of(self.reply_id, choice.index)
            marked = tool_calls.text_with_markers(self._tokenizer, ids)
            text, calls = tool_calls.split_calls(marked, spelled, prefix, self._body.most_calls)
            if calls:
                return text, calls
        return self._text(ids, reason), []

    def _text(self, ids: Sequence[int], reason: wire.FinishReason) -> str:
        """Return the answer without special tokens and without what ended it."""
        ends = {*self._body.stop_token_ids, *self._tokenizer.eos_token_ids}
        if reason == "stop" and ids and ids[-1] in ends:
            ids = ids[:-1]
        reader = channel_reader(self._tokenizer) if self._chat else None
        text = self._tokenizer.decode(ids) if reader is None else reader.text(ids)
        return before_stop(text, self._body.stops)

    def logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top: Sequence[TopLogprobs] = (),
        start: int = 0,
    ) -> Mapping[str, Any] | None:
        """Return one entry per token id, including the end token; None if the client wants none.

        ``start`` is the number of characters before these tokens.
        """
        if not self._body.wants_logprobs:
            return None
        tokens = [self._token(token_id) for token_id in ids]
        if self._chat:
            content = [
                _logprob_entry(token, logprob)
                | {
                    "top_logprobs": [
                        _logprob_entry(self._token(token_id), value)
                        for token_id, value in likeliest
                    ]
                }
                for token, logprob, likeliest in itertools.zip_longest(
                    tokens, logprobs, top or [()] * len(tokens)
                )
            ]
            return {"content": content, "refusal": None}
        offsets = list(itertools.accumulate((len(token) for token in tokens), initial=start))[:-1]
        best = [
            {self._token(token_id): value for token_id, value in reversed(likeliest)}
            for likeliest in top
        ] or None
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": best,
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def before_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of its stop strings."""
    places = [text.find(stop) for stop in stops]
    return text[: min((place for place in places if place >= 0), default=len(text))]


def runs_of(reply: wire.GenerateReply) -> list[list[int]]:
    """Return pairs (policy version, number of tokens)."""
    pairs: list[list[int]] = reply.version_runs.array().reshape(-1, 2).tolist()
    return pairs


def usage(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Return the token usage; a prompt with several choices counts once."""
    prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
    sampled = sum(len(choice.reply.token_ids.array()) for choice in choices)
    cached = sum(choice.reply.prefix_hit_tokens for choice in choices)
    return {
        "prompt_tokens": sum(prompts.values()),
        "completion_tokens": sampled,
        "total_tokens": sum(prompts.values()) + sampled,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def newest(choices: Sequence[AnswerChoice]) -> int:
    """Return the newest policy version of all choices."""
    return max(choice.reply.policy_version for choice in choices)


def _logprob_entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": _utf8_bytes(token)}


def _utf8_bytes(token: str) -> list[int] | None:
    """Return the UTF-8 of a token; None for an incomplete character."""
    return None if "\ufffd" in token else list(token.encode())
