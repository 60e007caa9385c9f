"""Text that a chat template puts between turns, checked once not to depend on earlier turns."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from broker.errors import ConfigError
from rlearner_text.chat_template import Chat
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import PROBE, PROBE_ID, ToolCall, ToolSyntax, UnknownSyntaxError, learn_syntax

Role = Literal["user", "tool"]

_ASKED: Final = ("first probe question", "second probe question", "third probe question")
_ANSWERED: Final = ("first probe answer 11213", "second probe answer 31415")
_DELTAS_KEPT: Final = 4096  # observations repeat; rendering a template takes about 0.1 ms
_OPENINGS_KEPT: Final = 256  # the episodes of a group start with the same text


class TemplateRules:
    """Text that a chat template puts around user messages and tool results, for one system prompt and set of tools.

    Attributes:
        end_of_turn_id: the special token that closes an assistant turn, None if the template uses plain text.
        stop_token_ids: tokens that end an assistant turn: the model's own and ``end_of_turn_id``.

    Raises:
        ConfigError: if the template is not prefix-stable for alternating user and assistant turns, or there are tools
            and it has no tool calls; names the model.
    """

    def __init__(self, tokenizer: Tokenizer, system_prompt: str = "", tools: str = "") -> None:
        self._tokenizer = tokenizer
        self._tools: list[dict[str, Any]] = json.loads(tools) if tools else []
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._check()
        self._spelling = self._find_spelling() if self._tools else None
        self.delta = lru_cache(maxsize=_DELTAS_KEPT)(self._delta)
        self.start = lru_cache(maxsize=_OPENINGS_KEPT)(self._start)

    def _start(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a first user message with system prompt and generation prompt."""
        return tuple(self._tokenizer.encode(self._render([_user(self._tokenizer.shield(text))])))

    def _delta(self, text: str, role: Role = "user") -> tuple[int, ...]:
        """Return the tokens after a turn of the policy: its end, the user or tool message, the generation prompt."""
        text = self._tokenizer.shield(text)
        return tuple(self._tokenizer.encode(self._tail(text, self._system) if role == "user" else self._answer(text)))

    def calls(self, text: str) -> list[ToolCall]:
        """Return the tool calls in a turn's text, which includes special tokens.

        Raises:
            BadCall: if it looks like a call, but is not valid.
        """
        return self._spelling.calls(text) if self._spelling else []

    def _find_spelling(self) -> ToolSyntax:
        asked = [_user(_ASKED[0])]
        words = self._render([*asked, _assistant(_ANSWERED[0])], prompt=False)
        try:
            spelling, behind = learn_syntax(self._render([*asked, PROBE], prompt=False), _before(words, _ANSWERED[0]))
        except UnknownSyntaxError as error:
            raise self._no_calls(str(error)) from None
        if not behind.endswith(self.end_of_turn):
            raise self._no_calls("it closes a turn with tool calls differently from one without")
        if _ASKED[1] not in self._answer(_ASKED[1]):
            raise self._no_calls("it does not render tool results")
        return spelling

    def _answer(self, text: str) -> str:
        """Return what the template puts after a turn that called a tool: its end, the result, the generation prompt."""
        name = str(PROBE["tool_calls"][0]["function"]["name"])
        answer = {"role": "tool", "name": name, "tool_call_id": PROBE_ID, "content": text}
        rendered = self._render([_user(_ASKED[0]), PROBE, answer])
        before = self._render([_user(_ASKED[0]), PROBE], prompt=False)
        if not rendered.startswith(before):
            raise self._no_calls("a turn with tool calls changes when a result follows")
        return self.end_of_turn + rendered[len(before) :]

    def _no_calls(self, problem: str) -> ConfigError:
        return self._rejected(f"cannot be used with tools: {problem}")

    def _rejected(self, why: str) -> ConfigError:
        return ConfigError("model.path", self._tokenizer.name, f"its chat template {why}; use another template")

    @cached_property
    def end_of_turn(self) -> str:
        """Text that the template puts after an assistant turn."""
        rendered = self._render([_user(_ASKED[0]), _assistant(_ANSWERED[0])], prompt=False)
        return _after(rendered, _ANSWERED[0])

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Tokens that close an assistant turn, through the first special one; empty if plain text closes it.

        There are several only if the template puts white space before its special token.
        """
        ids = self._tokenizer.encode(self.end_of_turn)
        special = next((i for i, token in enumerate(ids) if self._is_special(token)), None)
        if special is None or self._tokenizer.decode(ids[:special]).strip():
            return ()
        return tuple(ids[: special + 1])

    @cached_property
    def end_of_turn_id(self) -> int | None:
        return self.closing[-1] if self.closing else None

    def _is_special(self, token: int) -> bool:
        spelled = self._tokenizer.decode([token], skip_special_tokens=False)
        return bool(spelled.strip()) and not self._tokenizer.decode([token])

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        own = set(self._tokenizer.eos_token_ids)
        return tuple(sorted(own | ({self.end_of_turn_id} if self.end_of_turn_id is not None else set())))

    def _render(self, messages: Chat, *, prompt: bool = True, system: Chat | None = None) -> str:
        before = self._system if system is None else system
        return self._tokenizer.render_chat([*before, *messages], add_generation_prompt=prompt, tools=self._tools)

    def _tail(self, text: str, system: Chat) -> str:
        rendered = self._render([_user(_ASKED[0]), _assistant(_ANSWERED[0]), _user(text)], system=system)
        return _after(rendered, _ANSWERED[0])

    def _check(self) -> None:
        first, second, third = _ASKED
        one, two = _ANSWERED
        opening = self._render([_user(first)])
        short = self._render([_user(first), _assistant(one), _user(third)])
        long = self._render([_user(first), _assistant(one), _user(second), _assistant(two), _user(third)])
        for answer, rendered in ((one, short), (one, long), (two, long)):
            if rendered.count(answer) != 1:
                raise self._unstable("it does not render every assistant turn exactly once, unchanged")
        # Some templates open the turn with more, such as a thinking tag, or put a space before the answer.
        if not opening.startswith(_before(short, one).rstrip()):
            raise self._unstable("the beginning of a conversation changes when an answer follows")
        if third not in _after(short, one):
            raise self._unstable("it does not render a user message that follows an answer")
        if _after(short, one) != _after(long, two):
            raise self._unstable("what it puts after an answer depends on earlier turns")
        if self._tail(third, self._system) != self._tail(third, []):
            raise self._unstable("it repeats the system message in later turns")

    def _unstable(self, problem: str) -> ConfigError:
        return self._rejected(f"does not support turn-by-turn conversations: {problem}")


@lru_cache(maxsize=64)
def rules_for(tokenizer: Tokenizer, system_prompt: str = "", tools: str = "") -> TemplateRules:
    """Return the checked rules for a tokenizer, system prompt and set of tools (JSON); cached."""
    return TemplateRules(tokenizer, system_prompt, tools)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _after(rendered: str, marker: str) -> str:
    return rendered[rendered.index(marker) + len(marker) :]


def _before(rendered: str, marker: str) -> str:
    return rendered[: rendered.index(marker)]
