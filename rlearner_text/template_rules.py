"""What a chat template puts between two of the policy's turns, checked once to be the same whatever came before."""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from broker.errors import ConfigError
from rlearner_text.chat_template import Chat
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import PROBE, PROBE_ID, ToolCall, ToolSpelling, UnknownSpelling, probe

Role = Literal["user", "tool"]

_ASKED: Final = ("first probe question", "second probe question", "third probe question")
_ANSWERED: Final = ("first probe answer 11213", "second probe answer 31415")
_DELTAS_KEPT: Final = 4096  # observations repeat; a template takes some 0.1 ms to render
_OPENINGS_KEPT: Final = 256  # the episodes of a group begin with the same words


class GrowthRules:
    """What one model's chat template puts around user messages and tools' answers, for one system prompt and one set of tools.

    Attributes:
        end_of_turn_id: the special token that closes an assistant turn, None when the template uses plain text there.
        stop_token_ids: tokens at which an assistant turn should end: the model's own and ``end_of_turn_id``.

    Raises:
        ConfigError: the template is not prefix-stable for alternating user and assistant turns, or has no calls where there are
            tools; names the model.
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
        """Tokens of a conversation that begins with this user message, generation prompt included."""
        return tuple(self._tokenizer.encode(self._render([_user(text)])))

    def _delta(self, text: str, role: Role = "user") -> tuple[int, ...]:
        """Tokens that follow a turn of the policy: what ends it, then what the user or a tool says, and the generation prompt."""
        return tuple(self._tokenizer.encode(self._tail(text, self._system) if role == "user" else self._answer(text)))

    def calls(self, text: str) -> list[ToolCall]:
        """The tool calls in a turn's text, special tokens included.

        Raises:
            BadCall: it looks like one and is none.
        """
        return self._spelling.calls(text) if self._spelling else []

    def _find_spelling(self) -> ToolSpelling:
        asked = [_user(_ASKED[0])]
        words = self._render([*asked, _assistant(_ANSWERED[0])], prompt=False)
        try:
            spelling, behind = probe(self._render([*asked, PROBE], prompt=False), _before(words, _ANSWERED[0]))
        except UnknownSpelling as error:
            raise self._no_calls(str(error)) from None
        if not behind.endswith(self.end_of_turn):
            raise self._no_calls("it closes a turn with tool calls otherwise than one without")
        if _ASKED[1] not in self._answer(_ASKED[1]):
            raise self._no_calls("it does not show what a tool answers")
        return spelling

    def _answer(self, text: str) -> str:
        """What the template puts behind a turn that called a tool: its end, the tool's answer, the generation prompt."""
        answer = {"role": "tool", "name": str(PROBE["tool_calls"][0]["function"]["name"]), "tool_call_id": PROBE_ID, "content": text}
        rendered = self._render([_user(_ASKED[0]), PROBE, answer])
        before = self._render([_user(_ASKED[0]), PROBE], prompt=False)
        if not rendered.startswith(before):
            raise self._no_calls("a turn with tool calls changes when an answer follows")
        return self.end_of_turn + rendered[len(before) :]

    def _no_calls(self, problem: str) -> ConfigError:
        return ConfigError("model.path", self._tokenizer.name, f"its chat template cannot be used with tools: {problem}; give another one")

    @cached_property
    def end_of_turn(self) -> str:
        """What the template puts after the assistant's words, before anything else is said."""
        rendered = self._render([_user(_ASKED[0]), _assistant(_ANSWERED[0])], prompt=False)
        return _after(rendered, _ANSWERED[0])

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """The tokens that close an assistant turn, up to and with the first special one; empty when it is closed by plain text.

        More than one only where the template puts white space before its special token.
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
        return not self._tokenizer.decode([token]) and bool(self._tokenizer.decode([token], skip_special_tokens=False).strip())

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
                raise self._unstable("it does not show every assistant turn exactly once, unchanged")
        # Equal for most. Some open the turn with more, such as a thinking tag; some put a space before the answer's words.
        if not opening.startswith(_before(short, one).rstrip()):
            raise self._unstable("the beginning of a conversation changes when an answer follows")
        if third not in _after(short, one):
            raise self._unstable("it does not show a user message that follows an answer")
        if _after(short, one) != _after(long, two):
            raise self._unstable("what it puts after an answer depends on the turns before")
        if self._tail(third, self._system) != self._tail(third, []):
            raise self._unstable("it repeats the system message in later turns")

    def _unstable(self, problem: str) -> ConfigError:
        return ConfigError(
            "model.path",
            self._tokenizer.name,
            f"its chat template cannot grow a conversation turn by turn: {problem}; give another template",
        )


@lru_cache(maxsize=64)
def growth_rules(tokenizer: Tokenizer, system_prompt: str = "", tools: str = "") -> GrowthRules:
    """The rules for one tokenizer, system prompt and set of tools (JSON), checked once."""
    return GrowthRules(tokenizer, system_prompt, tools)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _after(rendered: str, marker: str) -> str:
    return rendered[rendered.index(marker) + len(marker) :]


def _before(rendered: str, marker: str) -> str:
    return rendered[: rendered.index(marker)]
