"""Learns a chat template's tool call syntax from a rendered probe, and parses calls in outputs.

Most templates put one JSON object per call between two markers (``<tool_call>…</tool_call>``), some
a list of them after one marker, some only the object. Keys differ, too. All of this is read from a
rendered probe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from broker.contract import strict
from rlearner_text.assistant_spans import common_length
from rlearner_text.thinking import without_thinking

_NAME: Final = "probe_tool_11213"
_ARGUMENTS: Final = {"probe_argument": "probe value 31415"}
# Nine characters, because some templates require that.
PROBE_ID: Final = "probe0001"
_CALL: Final = {
    "type": "function",
    "id": PROBE_ID,
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
PROBE: Final[Mapping[str, Any]] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


@dataclass(frozen=True)
class ToolCall:
    """One tool call in a model's output."""

    name: str
    arguments: dict[str, Any]


class ToolCallError(ValueError):
    """Output that begins like a tool call but is not valid; the message is for the policy."""


class UnknownSyntaxError(ValueError):
    """A template that does not write calls as JSON."""


@dataclass(frozen=True)
class ToolSyntax:
    """The syntax of tool calls.

    Attributes:
        opener: marker before the JSON of a call or a list of calls, stripped; empty if there is
            none.
        name_key, arguments_key: keys of the JSON object.
        before, after: all text around the JSON of one call, up to the end of the turn.
    """

    opener: str
    name_key: str
    arguments_key: str
    before: str = ""
    after: str = ""

    def calls(self, text: str) -> list[ToolCall]:
        """Return the calls in a turn's text, which includes special tokens, in order; empty for
        plain text.

        Raises:
            ToolCallError: if it looks like a call, but its JSON does not parse or has no name or
                arguments.
        """
        calls: list[ToolCall] = []
        if not self.opener:
            if text.lstrip().startswith(("{", "[")):
                return self._read(text.lstrip(), calls)[0]
            return calls
        remainder = text
        while (at := remainder.find(self.opener)) >= 0:
            calls, remainder = self._read(remainder[at + len(self.opener) :].lstrip(), calls)
        return calls

    def _read(self, text: str, calls: list[ToolCall]) -> tuple[list[ToolCall], str]:
        """Parse calls at the beginning of a text; return all calls found so far and the rest of the
        text.
        """
        try:
            value, end = strict.decode_prefix(text)
        except strict.BadJson as error:
            raise ToolCallError(f"the tool call is not valid JSON: {error}") from None
        values = value if isinstance(value, list) else [value]
        return calls + [self._call(value) for value in values], text[end:]

    def _call(self, value: object) -> ToolCall:
        name = value.get(self.name_key) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(name, str):
            raise ToolCallError(f'the tool call has no string as "{self.name_key}"')
        arguments = value.get(self.arguments_key, {})
        # Some templates write the object as a string.
        if isinstance(arguments, str):
            try:
                arguments = strict.parse_json(arguments)
            except strict.BadJson:
                arguments = None
        if not isinstance(arguments, dict):
            raise ToolCallError(f'the tool call\'s "{self.arguments_key}" is not an object')
        try:
            # It may go to another process.
            msgspec.msgpack.encode(arguments)
        except (OverflowError, RecursionError) as error:
            raise ToolCallError(
                f'the tool call\'s "{self.arguments_key}" cannot be passed on: {error}'
            ) from None
        return ToolCall(name, arguments)


def learn_syntax(rendered: str, text_before: str) -> tuple[ToolSyntax, str]:
    """Return a template's call syntax, and what it puts after the JSON of ``PROBE``.

    Args:
        rendered: a conversation that contains ``PROBE`` as its last assistant turn.
        before: the same conversation up to the first word of a text turn instead of ``PROBE``.

    Raises:
        UnknownSyntaxError: if the template does not render the call as JSON.
    """
    at = rendered.rfind(_NAME)
    for start in (i for i in range(at, -1, -1) if rendered[i] == "{"):
        try:
            value, end = json.JSONDecoder().raw_decode(rendered, start)
        except ValueError:
            continue
        keys = (
            {key: item for key, item in value.items() if item == _NAME or _is_arguments(item)}
            if end > at
            else {}
        )
        names = [key for key, item in keys.items() if item == _NAME]
        arguments = [key for key, item in keys.items() if item != _NAME]
        if names and arguments:
            ahead = without_thinking(
                rendered[common_length(rendered, text_before.rstrip()) : start]
            ).lstrip()
            opener = ahead.strip()
            behind = (
                rendered[end:].lstrip().removeprefix("]")
                if opener.endswith("[")
                else rendered[end:]
            )
            return ToolSyntax(
                opener.removesuffix("[").rstrip(), names[0], arguments[0], ahead, rendered[end:]
            ), behind
    raise UnknownSyntaxError(
        "it does not write tool calls as JSON objects with a name and arguments"
    )


def _is_arguments(value: object) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return value == _ARGUMENTS
