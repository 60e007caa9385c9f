"""Converts the content blocks of a request to the messages of a chat (pure)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import (
    MOST_PARTS,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
    P,
    StrictModel,
    Word,
    validate_part,
)
from rlearner_text.thinking import with_thinking

Block = dict[str, Any]
Blocks = str | Annotated[list[Block], Field(max_length=MOST_PARTS)]

# Claude Code sends its version and a checksum of the request as the first block of the system
# prompt. It is no part of the prompt, and would make every request begin differently.
_CLIENT_NOTE: Final = "x-anthropic-billing-header:"
# Reasoning that a server encrypted; this one never does.
_DROPPED: Final = ("redacted_thinking",)


class TextBlock(StrictModel):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier answer; the signature says which."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(StrictModel):
    """A call of a tool by the model."""

    type: Literal["tool_use"]
    id: Word
    name: Word
    input: dict[str, Any]


class ToolResultBlock(StrictModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Word
    content: Blocks = ""
    is_error: bool = False  # the text says so, too


class ToolReferenceBlock(StrictModel):
    """A tool that a search for tools has found."""

    type: Literal["tool_reference"]
    tool_name: Word


class InputMessage(StrictModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AssistantMessage(ChatMessage):
    """An answer that a client sends back, with its reasoning apart from its text.

    Clients may leave reasoning out, and never see it unless they ask for it.

    Attributes:
        thinking: the reasoning, empty if it is left out.
        signature: that of the answer, empty if there is none.
    """

    thinking: str = ""
    signature: str = ""

    @property
    def characters(self) -> int:
        return super().characters + len(self.thinking)

    def plain(self) -> dict[str, Any]:
        return super().plain() | {"content": with_thinking(self.thinking, self.text)}

    def spoken(self) -> dict[str, Any]:
        """Return the message in the form of chat templates, without reasoning."""
        return super().plain()


def system_text(system: Blocks) -> str:
    """Return the text of a system prompt.

    Raises:
        HttpError: 400 if it holds other blocks than texts.
    """
    texts = _read_texts(system, "system")
    return "\n".join(text for text in texts if not text.startswith(_CLIENT_NOTE))


def chat_messages(
    messages: Sequence[InputMessage],
    deferred: Mapping[str, Block] | None = None,
    *,
    late_system: bool = True,
) -> list[ChatMessage]:
    """Convert messages to those of a chat; results of tools become messages of their own.

    Args:
        deferred: functions that are described where a result names them, by name.
        late_system: whether system messages keep their role; otherwise the user says them.

    Raises:
        HttpError: 400 if a block is not allowed; names its place.
    """
    chat: list[ChatMessage] = []
    for number, message in enumerate(messages):
        place = f"messages.{number}.content"
        if message.role == "assistant":
            chat.append(_read_answer(message.content, place))
        elif message.role == "system":
            text = "\n".join(_read_texts(message.content, place))
            keeps_role = late_system or not chat
            chat.append(ChatMessage(role="system" if keeps_role else "user", content=text))
        else:
            chat += _read_user(message.content, place, deferred or {})
    return _join_users(chat)


def _read_answer(content: Blocks, place: str) -> AssistantMessage:
    texts: list[str] = []
    reasoning = ThinkingBlock(type="thinking", thinking="")
    calls: list[MessageToolCall] = []
    for block, name in _named_blocks(content, place):
        if block.get("type") == "thinking":
            reasoning = _read_block(ThinkingBlock, block, name)
        elif block.get("type") == "tool_use":
            use = _read_block(ToolUseBlock, block, name)
            function = CalledFunction(name=use.name, arguments=json.dumps(use.input))
            calls.append(MessageToolCall(id=use.id, function=function))
        elif block.get("type") not in _DROPPED:
            texts.append(_read_block(TextBlock, block, name).text)
    return AssistantMessage(
        role="assistant",
        content="".join(texts),
        tool_calls=calls or None,
        thinking=reasoning.thinking,
        signature=reasoning.signature,
    )


def _read_user(content: Blocks, place: str, deferred: Mapping[str, Block]) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    for block, name in _named_blocks(content, place):
        if block.get("type") == "tool_result":
            result = _read_block(ToolResultBlock, block, name)
            text = _read_result(result.content, f"{name}.content", deferred)
            messages.append(ChatMessage(role="tool", content=text, tool_call_id=result.tool_use_id))
        else:
            text = _read_block(TextBlock, block, name).text
            messages.append(ChatMessage(role="user", content=text))
    if not messages:
        raise HttpError(400, f"{place}: [] is not allowed; at least one block", param=place)
    return messages


def _read_result(content: Blocks, place: str, deferred: Mapping[str, Block]) -> str:
    texts = []
    for block, name in _named_blocks(content, place):
        if block.get("type") == "tool_reference":
            tool = _read_block(ToolReferenceBlock, block, name).tool_name
            function = json.dumps(deferred.get(tool, {"name": tool}))
            texts.append(f"<function>{function}</function>")
        else:
            texts.append(_read_block(TextBlock, block, name).text)
    return "\n".join(texts)


def _join_users(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join neighbouring messages of the user, as chat templates expect turns to alternate."""
    turns: list[ChatMessage] = []
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            text = f"{turns[-1].text}\n{message.text}"
            turns[-1] = ChatMessage(role="user", content=text)
        else:
            turns.append(message)
    return turns


def _read_texts(content: Blocks, place: str) -> list[str]:
    blocks = _named_blocks(content, place)
    return [_read_block(TextBlock, block, name).text for block, name in blocks]


def _named_blocks(content: Blocks, place: str) -> list[tuple[Block, str]]:
    """Return the blocks of a content with their places; a string is a text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, place)]
    return [(block, f"{place}.{number}") for number, block in enumerate(content)]


def _read_block(model: type[P], block: Block, place: str) -> P:
    """Validate a block as a type.

    Raises:
        HttpError: 400 if it has another type, or a field is not allowed; names it.
    """
    kind = block.get("type")
    own_types = model.model_fields["type"].annotation
    if kind is not None and kind not in getattr(own_types, "__args__", ()):
        raise HttpError(
            400,
            f"{place}: blocks of type {kind!r} are not supported here; the model reads text only",
            param=place,
            code="unsupported_parameter",
        )
    return validate_part(model, block, place)
