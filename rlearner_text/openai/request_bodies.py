"""Request bodies of /v1/chat/completions and /v1/completions, with validation (pure).

An unknown field that would change the output is rejected. A field that is null, has a neutral
value, or does not concern the output is accepted, so that common client libraries work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from broker.contract import strict
from broker.settings.sections import sentence
from rlearner_text.openai.http_errors import HttpError
from rlearner_text.thinking import with_thinking

B = TypeVar("B", bound="GenerationBody")
P = TypeVar("P", bound="StrictModel")

MOST_CHOICES: Final = 256  # per request, over all prompts
DEADLINE_S: Final = 600.0
COMPLETION_TOKENS: Final = 16  # OpenAI's default for /v1/completions
MOST_TOP_LOGPROBS: Final = 20  # OpenAI's own limit
# Reading a body must not take seconds; published limits and real conversations are far below these.
MOST_TOOLS: Final = 1024
MOST_MESSAGES: Final = 16_384
MOST_PARTS: Final = 4096  # of one message, and tool calls of it
MOST_BIASES: Final = 65_536
MOST_OBJECTS: Final = 100_000  # of a body, also lists and keys; what looks so in texts counts, too
LONG_BODY: Final = 65_536  # bytes; parsing more takes milliseconds

Neutral = Mapping[str, tuple[object, ...]]  # values without effect, by field

# About the client and not the output, or about the length of the output, which depends on training.
_LENGTH: Final = {"reasoning_effort", "verbosity"}
_CLIENT: Final = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_retention",
    "client_metadata",
}
_IGNORED: Final = frozenset({*_CLIENT, "request_id", *_LENGTH})
_NEUTRAL: Final[Neutral] = {
    "repetition_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),  # of a completion; a chat has them
    "response_format": ({"type": "text"},),  # of a completion
    "functions": ([],),
    "tools": ([],),  # of a completion; a chat has them
    "tool_choice": ("none", "auto"),  # of a completion
    "modalities": (["text"],),
}

_TYPE_NAMES: Final = frozenset({"str", "int", "bool"})

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Word = Annotated[str, Field(min_length=1)]


class StrictModel(BaseModel):
    """Base model: no type conversion, unknown fields kept for ``check_extra``."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """Optional parts of a stream."""

    include_usage: bool = False


class ContentPart(StrictModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    """Name and JSON arguments of a tool call."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, value: str) -> str:
        try:
            arguments = strict.parse_json(value or "{}")
        except strict.BadJson:
            arguments = None
        if not isinstance(arguments, dict):
            raise ValueError("the arguments must be a JSON object")
        return value or "{}"


class MessageToolCall(StrictModel):
    """A tool call by the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class OfferedFunction(StrictModel):
    """A function that the model may call; other fields go to the chat template unchanged."""

    name: Word


class OfferedTool(StrictModel):
    """A tool."""

    type: Literal["function"]
    function: OfferedFunction


class NamedChoice(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: OfferedFunction


class JsonSchema(StrictModel):
    """A named schema; the answer follows it whether it is strict or not."""

    name: str = ""
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(StrictModel):
    """The format of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if self.type == "json_schema" and (
            self.json_schema is None or self.json_schema.schema_ is None
        ):
            raise ValueError("json_schema.schema must be given")
        return self

    @property
    def wanted(self) -> dict[str, Any] | None:
        """Schema of the requested JSON; None for text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class ChatMessage(StrictModel):
    """One turn of a conversation.

    Attributes:
        reasoning_content: of an answer that comes back, where the client keeps it apart.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(max_length=MOST_PARTS)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=MOST_PARTS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        parts = (
            [part for part in value if isinstance(part, dict)] if isinstance(value, list) else []
        )
        odd = next((part["type"] for part in parts if part.get("type", "text") != "text"), None)
        if odd is not None:
            raise ValueError(f"only parts of type 'text' are supported, found {odd!r}")
        return value

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def characters(self) -> int:
        """Characters of its text and of the arguments of its calls."""
        calls = sum(len(call.function.arguments) for call in self.tool_calls or ())
        return len(self.text) + len(self.reasoning_content or "") + calls

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": with_thinking(self.reasoning_content or "", self.text),
        }
        for call in self.tool_calls or ():
            function = {
                "name": call.function.name,
                "arguments": json.loads(call.function.arguments),
            }
            plain.setdefault("tool_calls", []).append(
                {"id": call.id, "type": "function", "function": function}
            )
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("content must be given")
        if self.reasoning_content and self.role != "assistant":
            raise ValueError("reasoning_content is for role 'assistant' only")
        return self


class GenerationBody(StrictModel):
    """Fields of both APIs. The last seven are not OpenAI's."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    stop: Word | Annotated[list[Word], Field(max_length=64)] = []
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    prompt_cache_key: str = ""  # requests with one key extend the same prefix
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    # by token id
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
    ] = {}
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    return_token_ids: bool = True
    min_version: Annotated[int, Field(ge=0, lt=2**62)] = 0  # wait for at least this policy version
    # then the output so far is returned
    deadline_s: Annotated[float, Field(gt=0, le=86400)] = DEADLINE_S

    @field_validator("logit_bias")
    @classmethod
    def _ids(cls, value: dict[str, float]) -> dict[str, float]:
        odd = next(
            (key for key in value if not (key.isascii() and key.isdigit() and int(key) < 2**31)),
            None,
        )
        if odd is not None:
            raise ValueError(f"keys must be token ids, found {odd!r}")
        return value

    @property
    def biases(self) -> dict[int, float]:
        return {int(key): value for key, value in self.logit_bias.items()}

    @property
    def wants_logprobs(self) -> bool:
        return False

    @property
    def wanted_top(self) -> int:
        """Requested number of likeliest tokens at each position."""
        return 0

    @property
    def characters(self) -> int:
        """Characters of its longest prompt, without those that a chat template adds."""
        return 0

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class ChatBody(GenerationBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] = 0
    tools: Annotated[list[OfferedTool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat = ResponseFormat()

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    @property
    def wanted_top(self) -> int:
        return self.top_logprobs

    @property
    def most_calls(self) -> int | None:
        """Most tool calls of one answer; further ones are dropped. None: any number."""
        return None if self.parallel_tool_calls else 1

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form of chat templates; empty if the client wants no calls."""
        return [tool.model_dump() for tool in self.tools] if self.tool_choice != "none" else []

    @property
    def characters(self) -> int:
        return sum(message.characters for message in self.messages) + _count_characters(
            self.offered
        )

    @property
    def forced(self) -> bool:
        """Whether the answer must be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        return [tool for tool in self.offered if name in (None, tool["function"]["name"])]

    @model_validator(mode="after")
    def _can_call(self) -> Self:
        if self.forced and not self.callable_tools:
            raise ValueError("tool_choice requires a call, but tools has no matching tool")
        return self


class CompletionBody(GenerationBody):
    """The body of /v1/completions; ``logprobs``: how many tokens besides the sampled one."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def wanted_top(self) -> int:
        return 0 if isinstance(self.logprobs, bool) else self.logprobs or 0

    @property
    def characters(self) -> int:
        return max((len(prompt) for prompt in self.prompts() if isinstance(prompt, str)), default=0)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, all as text or all as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return cast("list[str] | list[list[int]]", self.prompt)


def _count_characters(value: Any) -> int:
    """Count the characters of all texts in a JSON value."""
    if isinstance(value, Mapping):
        return sum(_count_characters(key) + _count_characters(item) for key, item in value.items())
    if isinstance(value, list):
        return sum(map(_count_characters, value))
    return len(value) if isinstance(value, str) else 0


def parse(raw: bytes, model: type[B]) -> B:
    """Parse and validate a body.

    Raises:
        HttpError: 400 if it is invalid; names the first wrong field.
    """
    if any(raw.count(mark) > MOST_OBJECTS for mark in (b"{", b"[", b'":')):
        raise HttpError(400, f"the body has more than {MOST_OBJECTS} objects, lists or keys")
    try:
        values = strict.parse_json(raw)
    except strict.BadJson as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise HttpError(400, "the body must be a JSON object")
    try:
        body = model.model_validate(
            {key: value for key, value in values.items() if value is not None}
        )
    except ValidationError as error:
        raise validation_error(error) from None
    if isinstance(body, CompletionBody) and (count := len(body.prompts())) * body.n > MOST_CHOICES:
        raise HttpError(
            400, f"{count} prompts with n={body.n}: at most {MOST_CHOICES} choices", param="n"
        )
    if isinstance(body, (ChatBody, CompletionBody)):
        check_extra(body.model_extra, "")
    if isinstance(body, ChatBody):
        if body.top_logprobs and not body.logprobs:
            raise HttpError(
                400,
                f"top_logprobs: {body.top_logprobs} is not allowed without logprobs: true",
                param="top_logprobs",
            )
        for number, message in enumerate(body.messages):
            check_extra(
                message.model_extra, f"messages.{number}.", ignored=frozenset({"name", "refusal"})
            )
    return body


def validate_part(model: type[P], fields: dict[str, Any], place: str) -> P:
    """Validate a part of a body, such as an item or a tool; a field that is null is not given.

    Raises:
        HttpError: 400 if a field is not allowed; names it after the ``place``.
    """
    try:
        return model.model_validate(
            {key: value for key, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise validation_error(error, place) from None


def check_extra(
    extra: Mapping[str, Any] | None,
    prefix: str,
    ignored: frozenset[str] = _IGNORED,
    neutral: Neutral = _NEUTRAL,
) -> None:
    """Reject a field that the model does not define, unless it has no effect on the output.

    Raises:
        HttpError: 400 if there is one; names the field, after the ``prefix``
            (``messages.3.``).
    """
    for key, value in (extra or {}).items():
        if value is not None and key not in ignored and value not in neutral.get(key, ()):
            raise HttpError(
                400,
                f"{prefix}{key} is not supported by this server",
                param=prefix + key,
                code="unsupported_parameter",
            )


def validation_error(error: ValidationError, place: str = "") -> HttpError:
    """Convert the first error of a body, or of its part at ``place``, to an error answer."""
    first = error.errors()[0]
    # The location names branches of a union by type, such as ``str`` or ``list[str]``, which are
    # not in the request.
    loc = [
        step
        for step in first["loc"]
        if isinstance(step, int) or (step.isidentifier() and step not in _TYPE_NAMES)
    ]
    param = ".".join(map(str, [place, *loc] if place else loc))
    if not param:
        # of the body as a whole
        return HttpError(400, sentence(first["msg"]))
    if first["type"] == "missing":
        return HttpError(400, f"{param} must be given", param=param)
    value_text = repr(first["input"])
    excerpt = value_text if len(value_text) <= 80 else value_text[:77] + "..."
    return HttpError(
        400, f"{param}: {excerpt} is not allowed; {sentence(first['msg'])}", param=param
    )
