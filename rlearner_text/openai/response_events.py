"""Builds the response object of /v1/responses and its stream events (pure)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rlearner_text.openai.answer_store import Item
from rlearner_text.openai.answers import AnswerChoice, AnswerWriter, runs_of, usage
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import ChatBody
from rlearner_text.openai.response_tools import call_names, namespaces_of
from rlearner_text.openai.responses import ResponsesBody
from rlearner_text.openai.sse_chunks import partial_text_of
from rlearner_text.openai.token_events import TokenEvent, TopLogprobs
from rlearner_text.tokenizer import Tokenizer

# Fields of the request that the response repeats.
_ECHOED: Final = (
    "instructions",
    "max_output_tokens",
    "parallel_tool_calls",
    "previous_response_id",
    "temperature",
)
_ECHOED_TOO: Final = ("tool_choice", "tools", "top_logprobs", "top_p")

Keep = Callable[[str, Sequence[Item]], None]


class ResponsesFormat:
    """Answer format of /v1/responses; see ``rlearner_text.openai.streaming.AnswerFormat``.

    ``keep`` is called with the response's id and items before they are sent.
    """

    idle_event = None

    def __init__(
        self,
        body: ResponsesBody,
        chat: ChatBody,
        tokenizer: Tokenizer,
        keep: Keep,
        writer: AnswerWriter,
    ) -> None:
        self._body = body
        self._chat = chat
        self._tokenizer = tokenizer
        self._keep = keep
        self._writer = writer
        self._namespaces = namespaces_of(body.tools)
        self.response_id = f"resp_{writer.reply_id}"

    def whole(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the answer in one piece."""
        (choice,) = choices
        reason = choice.reply.finish_reason
        output = self.items(choice)
        complete = reason == "stop" or any(item["type"] == "function_call" for item in output)
        answer = self.object("completed" if complete else "incomplete", output)
        self._keep(answer["id"], answer["output"])
        if not complete:
            answer["incomplete_details"] = {
                "reason": "max_output_tokens" if reason == "length" else reason
            }
        answer["usage"] = _format_usage(choices)
        answer |= {
            "policy_version": choice.reply.policy_version,
            "version_runs": runs_of(choice.reply),
        }
        if self._body.return_token_ids:
            answer |= {
                "prompt_token_ids": list(choice.prompt),
                "token_ids": choice.reply.token_ids.array().tolist(),
            }
        return answer

    def object(self, status: str, output: list[Item]) -> dict[str, Any]:
        """Return the fields that the whole answer and stream events share."""
        echoed = {name: getattr(self._body, name) for name in (*_ECHOED, *_ECHOED_TOO)}
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._writer.created,
            "model": self._writer.model,
            "status": status,
            "output": output,
            **echoed,
            "text": {"format": self._body.text.format},
            "reasoning": {"effort": self._body.reasoning.effort, "summary": None},
            "store": self._body.store,
            "metadata": (self._body.model_extra or {}).get("metadata") or {},
            "truncation": "disabled",
            **dict.fromkeys(("incomplete_details", "error", "usage")),
        }

    def items(self, choice: AnswerChoice) -> list[Item]:
        """Return the output: a message unless there are only calls, then the calls."""
        text, calls = self._writer.said(choice)
        status = "completed" if calls or choice.reply.finish_reason == "stop" else "incomplete"
        ids = choice.reply.token_ids.array().tolist()
        drawn_logprobs = choice.reply.logprobs.array().tolist()
        logprobs = self.logprobs(ids, drawn_logprobs, choice.top)
        message = [self.message(status, [self.part(text, logprobs)])] if text or not calls else []
        return message + [self.call(call, number, "completed") for number, call in enumerate(calls)]

    def message(self, status: str, parts: list[dict[str, Any]]) -> Item:
        item = {"id": f"msg_{self._writer.reply_id}", "type": "message", "role": "assistant"}
        return item | {"status": status, "content": parts}

    def part(self, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        """Return the text part of a message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def call(self, call: dict[str, Any], number: int, status: str) -> Item:
        """Convert a chat's tool call to an item."""
        item_id = f"fc_{self._writer.reply_id}{number:02d}"
        item = {"id": item_id, "type": "function_call", "status": status, "call_id": call["id"]}
        item |= call_names(call["function"]["name"], self._namespaces)
        return item | {"arguments": call["function"]["arguments"]}

    def logprobs(
        self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[TopLogprobs]
    ) -> list[Any]:
        """Return one entry per token; empty if none are requested."""
        entries = self._writer.logprobs(ids, logprobs, top)
        return [] if entries is None else list(entries["content"])

    def events(self, index: int, prompt: Sequence[int]) -> ResponseEvents:
        """Return the events of a stream."""
        return ResponseEvents(
            self, partial_text_of(self._chat, self._tokenizer), self._writer, prompt
        )

    def ending(self, choices: Sequence[AnswerChoice]) -> list[bytes]:
        """Return nothing: the last event marks the end of the stream."""
        return []

    def error(self, problem: HttpError) -> dict[str, Any]:
        return problem.body


class ResponseEvents:
    """The events of one streamed response; ``sse_chunks`` explains the timing of text."""

    def __init__(
        self, response: ResponsesFormat, spoken: Any, writer: AnswerWriter, prompt: Sequence[int]
    ) -> None:
        self._response = response
        self._spoken = spoken
        self._writer = writer
        self._prompt = prompt
        self._number = -1
        self._told = 0
        # Whether the message item has started.
        self._open = False
        self.top: list[TopLogprobs] = []

    def of(self, pieces: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        """Return the events of new pieces."""
        ids = [entry for piece in pieces for entry in piece.token_ids]
        logprobs = [entry for piece in pieces for entry in piece.logprobs]
        top = [entry for piece in pieces for entry in piece.top]
        self.top += top
        self._told += len(ids)
        text = self._spoken.add(ids)
        return [
            *self._begin(),
            *(self._words(text, self._response.logprobs(ids, logprobs, top)) if text else []),
        ]

    def last(self, choice: AnswerChoice) -> list[dict[str, Any]]:
        """Return the events of the rest of a finished choice and of its end."""
        text, calls = self._writer.said(choice)
        events = self._begin()
        remainder = self._spoken.rest(text)
        if remainder or not (self._open or calls):
            ids = choice.reply.token_ids.array().tolist()
            logprobs = choice.reply.logprobs.array().tolist()
            events += self._words(
                remainder, self._response.logprobs(ids[self._told :], logprobs[self._told :], ())
            )
        whole = self._response.whole([choice])
        for index, item in enumerate(whole["output"]):
            events += (
                self._end_message(item) if item["type"] == "message" else self._call(item, index)
            )
        return [*events, self._event(f"response.{whole['status']}", response=whole)]

    def _begin(self) -> list[dict[str, Any]]:
        if self._number >= 0:
            return []
        response = self._response.object("in_progress", [])
        return [
            self._event(kind, response=response)
            for kind in ("response.created", "response.in_progress")
        ]

    def _words(self, text: str, logprobs: list[Any]) -> list[dict[str, Any]]:
        events = []
        item = self._response.message("in_progress", [])
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        if not self._open:
            self._open = True
            events.append(self._event("response.output_item.added", output_index=0, item=item))
            events.append(
                self._event("response.content_part.added", **place, part=self._response.part(""))
            )
        return [
            *events,
            self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs),
        ]

    def _end_message(self, item: Item) -> list[dict[str, Any]]:
        (part,) = item["content"]
        place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
        return [
            self._event(
                "response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]
            ),
            self._event("response.content_part.done", **place, part=part),
            self._event("response.output_item.done", output_index=0, item=item),
        ]

    def _call(self, item: Item, index: int) -> list[dict[str, Any]]:
        place = {"item_id": item["id"], "output_index": index}
        opened = item | {"arguments": "", "status": "in_progress"}
        arguments = {"name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.output_item.added", output_index=index, item=opened),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number, **fields}


def _format_usage(choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    counts = usage(choices)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": counts["prompt_tokens_details"],
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
