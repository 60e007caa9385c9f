"""Converts requests to /v1/responses into chats; pure, given the stored earlier answers.

The items of an input become the messages of a chat: a function call joins the assistant's message
before it, a reasoning item is dropped, an item referenced by id is looked up in this server's
earlier answers. The rest is handled as a chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, PositiveInt, ValidationError

from rlearner_text.openai.answer_store import AnswerStore, Item
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    ChatBody,
    GenerationBody,
    Neutral,
    P,
    StrictModel,
    check_extra,
    validate_part,
    validation_error,
)
from rlearner_text.openai.response_tools import chat_tools, offered_name

_LOGPROBS: Final = "message.output_text.logprobs"
_TEXTS: Final = ("input_text", "output_text", "text")
# About the client, or about features that only OpenAI's own models have.
_IGNORED: Final = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_retention",
        "max_tool_calls",
        "client_metadata",
    }
)
_NEUTRAL: Final[Neutral] = {"background": (False,), "truncation": ("disabled", "auto")}


class TextPart(StrictModel):
    """A part of a message; only text is supported."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(StrictModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class CallItem(StrictModel):
    """A function call by the model."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    arguments: str


class CallOutputItem(StrictModel):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: str | list[TextPart]


class ReasoningOptions(StrictModel):
    """Accepted without effect: how long a policy thinks depends on its training."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(StrictModel):
    """The format of the answer."""

    format: dict[str, Any] = Field(default_factory=lambda: {"type": "text"})
    verbosity: str | None = None  # accepted without effect


class ResponsesBody(GenerationBody):
    """The body of /v1/responses, with the additional fields of ``GenerationBody``."""

    input: str | Annotated[list[dict[str, Any]], Field(max_length=MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    previous_response_id: str | None = None
    store: bool = True
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0
    include: list[str] = Field(default_factory=list)
    n: Literal[1] = 1

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in self.include or self.top_logprobs > 0


def chat_of(body: ResponsesBody, items: list[Item]) -> ChatBody:
    """Convert a request with its items (see ``items_of``) to a chat.

    Raises:
        HttpError: 400 if a field is not allowed; names it.
    """
    check_extra(body.model_extra, "", ignored=_IGNORED, neutral=_NEUTRAL)
    for name in ("reasoning", "text"):
        check_extra(getattr(body, name).model_extra, f"{name}.")
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    for number, item in enumerate(items):
        _append_item(messages, item, f"input.{number}")
    if not messages:
        raise HttpError(400, "input: [] is not allowed; at least one item", param="input")
    fields = {
        name: getattr(body, name)
        for name in GenerationBody.model_fields
        if name in body.model_fields_set
    }
    fields |= {
        "messages": messages,
        "tools": chat_tools(body.tools),
    }
    fields |= {
        "tool_choice": _chat_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
    }
    fields |= {"logprobs": body.wants_logprobs, "top_logprobs": body.top_logprobs}
    if (form := _response_format(body.text.format)) is not None:
        fields["response_format"] = form
    try:
        chat = ChatBody.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
    check_extra(chat.model_extra, "")
    return chat


def items_of(body: ResponsesBody, store: AnswerStore) -> list[Item]:
    """Return the whole input: earlier items first, references resolved.

    Raises:
        HttpError: 400 if this server does not have a referenced answer or item.
    """
    new_items = (
        [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    )
    earlier: list[Item] = []
    if body.previous_response_id is not None:
        conversation = store.conversation(body.previous_response_id)
        if conversation is None:
            raise _unknown_id("previous_response_id", body.previous_response_id)
        earlier = conversation
    return [
        *earlier,
        *(_resolve_item(item, number, store) for number, item in enumerate(new_items)),
    ]


def _resolve_item(item: Item, number: int, store: AnswerStore) -> Item:
    if item.get("type") != "item_reference":
        return item
    stored_item = store.item(str(item.get("id")))
    if stored_item is None:
        raise _unknown_id(f"input.{number}.id", item.get("id"))
    return stored_item


def _unknown_id(param: str, value: object) -> HttpError:
    reason = "this server keeps no answer with this id; send the items instead"
    return HttpError(400, f"{param}: {value!r} is not allowed; {reason}", param=param)


def _append_item(messages: list[dict[str, Any]], item: Item, place: str) -> None:
    """Append one item to the messages of a chat."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "message":
        message = _validate_item(MessageItem, item, place)
        messages.append({"role": message.role, "content": _plain_text(message.content)})
    elif kind == "function_call":
        call = _validate_item(CallItem, item, place)
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        tool_call = {
            "id": call.call_id,
            "type": "function",
            "function": {
                "name": offered_name(call.name, call.namespace),
                "arguments": call.arguments,
            },
        }
        messages[-1].setdefault("tool_calls", []).append(tool_call)
    elif kind == "function_call_output":
        output = _validate_item(CallOutputItem, item, place)
        messages.append(
            {"role": "tool", "tool_call_id": output.call_id, "content": _plain_text(output.output)}
        )
    else:
        known_types = "message, function_call, function_call_output, reasoning or item_reference"
        raise HttpError(
            400, f"{place}.type: {kind!r} is not allowed; {known_types}", param=f"{place}.type"
        )


def _plain_text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _validate_item(model: type[P], value: dict[str, Any], place: str) -> P:
    """Validate an item or tool as its type.

    Raises:
        HttpError: 400 if a field is not allowed; names it.
    """
    content = value.get("content", value.get("output"))
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") not in _TEXTS:
            raise HttpError(
                400,
                f"{place}: only text parts are supported, found type {part.get('type')!r}",
                param=place,
            )
    return validate_part(model, value, place)


def _chat_choice(choice: str | dict[str, Any]) -> object:
    """Convert ``{"type": "function", "name": …}`` to a chat's form; leave other values."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(format_value: dict[str, Any]) -> dict[str, Any] | None:
    """Convert ``text.format`` to a chat's ``response_format``; None for text."""
    if format_value.get("type") == "text":
        return None
    if format_value.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {key: value for key, value in format_value.items() if key != "type"},
        }
    return format_value
