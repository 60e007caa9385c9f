"""Request bodies of /v1/messages and their conversion to chats (pure).

Unlike those of OpenAI's protocol, unknown fields are accepted: clients send many that belong to
features in beta, and none of them changes what this server samples.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, field_validator, model_validator

from rlearner_text.anthropic.content_blocks import (
    Blocks,
    InputMessage,
    chat_messages,
    system_text,
)
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.openai.request_bodies import (
    MOST_MESSAGES,
    MOST_TOOLS,
    ChatBody,
    ChatMessage,
    GenerationBody,
    StrictModel,
    Word,
    validate_part,
    validation_error,
)
from rlearner_text.openai.response_tools import note_dropped

# Tools that Anthropic's servers run, by the beginning of their types.
_SERVER_TOOLS: Final = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",
    "mcp_toolset",
)


class CustomTool(StrictModel):
    """A tool that the client runs.

    Attributes:
        defer_loading: it is described once a search for tools has found it, not from the start.
    """

    name: Word
    description: str | None = None
    input_schema: dict[str, Any]
    defer_loading: bool = False

    def function(self) -> dict[str, Any]:
        """Return the function of a chat's tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return function | {"parameters": self.input_schema}


class ToolChoice(StrictModel):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_tool(self) -> Self:
        if self.type == "tool" and not self.name:
            raise ValueError("name must be given")
        return self

    @property
    def chat_choice(self) -> object:
        """The value of a chat's ``tool_choice``."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none"}[self.type]


class ThinkingOptions(StrictModel):
    """Whether reasoning is shown; how long a policy thinks depends on its training.

    Attributes:
        display: ``omitted`` sends blocks without their text.
    """

    type: str = "disabled"
    display: str = "summarized"


class OutputFormat(StrictModel):
    """The format of an answer."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputOptions(StrictModel):
    """Options of an answer; its effort has no effect."""

    format: OutputFormat | None = None


class PromptBody(GenerationBody):
    """The body of /v1/messages/count_tokens, with the additional fields of ``GenerationBody``."""

    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    system: Blocks = ""
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingOptions = ThinkingOptions()
    stop_sequences: Annotated[list[Word], Field(max_length=64)] = Field(default_factory=list)
    output_config: OutputOptions = OutputOptions()
    output_format: OutputFormat | None = None  # where clients sent it before output_config
    n: Literal[1] = 1
    return_token_ids: bool = False

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has blocks of reasoning."""
        return self.thinking.type != "disabled"

    @property
    def omits_thinking(self) -> bool:
        """Whether these blocks are without their text."""
        return self.thinking.display == "omitted"


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: PositiveInt

    @field_validator("messages")
    @classmethod
    def _end_with_user(cls, messages: list[InputMessage]) -> list[InputMessage]:
        if messages[-1].role == "assistant":
            raise ValueError("the last message must be the user's: answers cannot be prefilled")
        return messages


class MessagesChat(ChatBody):
    """A chat of Anthropic's protocol: clients may send answers back without their reasoning."""


def chat_of(body: PromptBody, *, late_system: bool = True) -> MessagesChat:
    """Convert a request to a chat.

    Args:
        late_system: whether the chat template shows a system message that follows a user's.

    Raises:
        HttpError: 400 if a block or tool is not allowed, or a call is forced and there is no tool.
    """
    fields = {
        name: getattr(body, name)
        for name in GenerationBody.model_fields
        if name in body.model_fields_set
    }
    tools = _read_tools(body.tools)
    deferred = {tool.name: tool.function() for tool in tools if tool.defer_loading}
    messages = chat_messages(body.messages, deferred, late_system=late_system)
    system = system_text(body.system)
    if system:
        messages.insert(0, ChatMessage(role="system", content=system))
    fields |= {
        "messages": messages,
        "tools": [
            {"type": "function", "function": tool.function()}
            for tool in tools
            if not tool.defer_loading
        ],
        "tool_choice": body.tool_choice.chat_choice,
        "parallel_tool_calls": not body.tool_choice.disable_parallel_tool_use,
        "stop": body.stop_sequences,
    }
    output_format = body.output_config.format or body.output_format
    if output_format is not None:
        schema = {"schema": output_format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    try:
        return MessagesChat.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None


def _read_tools(tools: list[dict[str, Any]]) -> list[CustomTool]:
    """Return the tools without those that only Anthropic's servers can run."""
    custom_tools = []
    for number, tool in enumerate(tools):
        kind = tool.get("type") or "custom"
        if kind != "custom" and str(kind).startswith(_SERVER_TOOLS):
            note_dropped(str(kind))
        elif kind == "custom":
            custom_tools.append(validate_part(CustomTool, tool, f"tools.{number}"))
        else:
            raise HttpError(
                400,
                f"tools.{number}.type: {kind!r} is not allowed; describe the tool by name and "
                "input_schema",
                param=f"tools.{number}.type",
                code="unsupported_parameter",
            )
    return custom_tools
