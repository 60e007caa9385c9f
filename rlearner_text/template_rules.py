"""Text that a chat template puts between turns, checked once not to depend on earlier turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Final, Literal

from broker.errors import ConfigError
from rlearner_text.assistant_spans import common_length, continued_span, rendered_span
from rlearner_text.chat_template import Chat
from rlearner_text.thinking import CLOSE, OPEN, is_open
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import (
    PROBE,
    PROBE_ID,
    ToolCall,
    ToolSyntax,
    UnknownSyntaxError,
    learn_syntax,
)
from rlearner_text.turn_text import TurnReader

Role = Literal["user", "tool"]
Examples = tuple[tuple[str, str], ...]  # question and answer of each
Texts = str | tuple[str, ...]  # of a message, or of the results of several calls

_QUESTIONS: Final = ("first probe question", "second probe question", "third probe question")
_ANSWERS: Final = ("first probe answer 11213", "second probe answer 31415")
# Observations repeat; rendering a template takes about 0.1 ms.
_DELTAS_KEPT: Final = 4096
# The episodes of a group start with the same text.
_OPENINGS_KEPT: Final = 256


class TemplateRules:
    """Text that a chat template puts around user messages and tool results, for one system prompt,
    set of tools and list of examples.

    All three stand at the beginning of a conversation, also with a template that moves them to the
    newest message, because tokens that were read once do not change.

    Attributes:
        end_of_turn_id: the special token that closes an assistant turn, None if the template uses
            plain text.
        stop_token_ids: tokens that end an assistant turn: the model's own and ``end_of_turn_id``.

    Raises:
        ConfigError: if the template is not prefix-stable for alternating user and assistant turns,
            or there are tools and it has no tool calls; names the model.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system_prompt: str = "",
        tools: str = "",
        examples: Examples = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._tools: list[dict[str, Any]] = json.loads(tools) if tools else []
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._examples = [
            message
            for question, answer in examples
            for message in (_user_message(tokenizer.shield(question)), _assistant_message(answer))
        ]
        self._moves_preamble = self._tail(_QUESTIONS[2], bare=False) != self._tail(
            _QUESTIONS[2], bare=True
        )
        self._check()
        self._spelling = self._find_spelling() if self._tools else None
        if self._spelling is not None and _QUESTIONS[1] not in self._result(
            [_QUESTIONS[1]], self._spelling
        ):
            raise self._no_calls("it does not render tool results")
        self.delta = lru_cache(maxsize=_DELTAS_KEPT)(self._delta)
        self.start = lru_cache(maxsize=_OPENINGS_KEPT)(self._start)
        self._endings: dict[Role, tuple[int, ...]] = {}

    def _start(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a first user message with system prompt and generation prompt."""
        return tuple(
            self._tokenizer.encode(self._render([_user_message(self._tokenizer.shield(text))]))
        )

    def _delta(self, text: Texts, role: Role = "user") -> tuple[int, ...]:
        """Return the tokens after a turn of the policy: its end, the message, the prompt."""
        texts = [text] if isinstance(text, str) else text
        shielded = [self._tokenizer.shield(part) for part in texts]
        if role == "user":
            tail = self._tail("".join(shielded), bare=self._moves_preamble)
        elif self._spelling is not None:
            tail = self._result(shielded, self._spelling)
        else:
            raise self._no_calls("the conversation has none")
        return tuple(self._tokenizer.encode(tail))

    def answer(self, text: str, calls: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of an assistant's message, with tool calls in OpenAI's form, as the
        policy would have sampled them, with their end of turn.

        They continue the generation prompt. Where the template has no token that closes a turn, the
        model's end token does.

        Raises:
            ConfigError: if the template rejects the message.
        """
        question = [_user_message(_QUESTIONS[0])]
        prompt = _text_after(self._render(question), _QUESTIONS[0])
        span = None
        turn = ""
        for message in self._forms(text, calls):
            turn = _text_after(self._render([*question, message], prompt=False), _QUESTIONS[0])
            if (span := rendered_span(prompt, turn, self.end_of_turn, text)) is not None:
                break
        if calls and (span is None or str(calls[0]["function"]["name"]) not in span):
            raise self._no_calls("a turn with calls does not continue its generation prompt")
        if span is None:
            span = continued_span(prompt, turn, text)
        closing = self.closing or self._tokenizer.eos_token_ids[:1]
        return [*self._tokenizer.encode_continuation(span), *closing]

    def _forms(self, text: str, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an assistant's message in the forms in which the template may take it."""
        if calls:
            return [_assistant_message(text) | {"tool_calls": list(calls)}]
        reasoning, is_closed, answer = text.rpartition(CLOSE)
        if not is_closed or not self.reader.has_channels:
            return [_assistant_message(text)]
        thinking = reasoning.strip().removeprefix(OPEN).strip()
        thinking_fields = {
            "thinking": thinking,
            "reasoning_content": thinking,
        }  # as templates name it
        return [_assistant_message(answer.strip()) | thinking_fields, _assistant_message(text)]

    def text(self, token_ids: Sequence[int]) -> str:
        """Return a sampled turn's text without special tokens; reasoning in ``<think>`` tags."""
        return self.reader.text(token_ids)

    def calls(self, text: str) -> list[ToolCall]:
        """Return the tool calls in a turn's text, which includes special tokens.

        Raises:
            ToolCallError: if it looks like a call, but is not valid.
        """
        return self._spelling.calls(text) if self._spelling else []

    def _find_spelling(self) -> ToolSyntax:
        question = [_user_message(_QUESTIONS[0])]
        words = self._render([*question, _assistant_message(_ANSWERS[0])], prompt=False)
        try:
            spelling, behind = learn_syntax(
                self._render([*question, PROBE], prompt=False), _text_before(words, _ANSWERS[0])
            )
        except UnknownSyntaxError as error:
            raise self._no_calls(str(error)) from None
        if not behind.strip() or not behind.endswith(self.end_of_turn):
            raise self._no_calls("it closes a turn with tool calls differently from one without")
        return spelling

    def _result(self, texts: Sequence[str], spelling: ToolSyntax) -> str:
        """Return what follows a turn that called tools: its end, the results, the prompt."""
        function = str(PROBE["tool_calls"][0]["function"]["name"])
        result = {"role": "tool", "name": function, "tool_call_id": PROBE_ID}
        results = [result | {"content": text} for text in texts]
        rendered = self._render([_user_message(_QUESTIONS[0]), PROBE, *results])
        # The call may follow other text than in a turn that ends the conversation, such as an empty
        # thinking block.
        _, is_closed, tail = rendered.partition(function)[2].partition(spelling.after)
        if not is_closed:
            raise self._no_calls("a turn with tool calls changes when a result follows")
        return self.end_of_turn + tail

    def _no_calls(self, problem: str) -> ConfigError:
        return self._rejected(f"cannot be used with tools: {problem}")

    def _rejected(self, reason: str) -> ConfigError:
        return self._tokenizer.template_error(f"{reason}; use another template")

    @cached_property
    def end_of_turn(self) -> str:
        """Text that the template puts after an assistant turn."""
        rendered = self._render(
            [_user_message(_QUESTIONS[0]), _assistant_message(_ANSWERS[0])], prompt=False
        )
        return _text_after(rendered, _ANSWERS[0])

    @cached_property
    def closing(self) -> tuple[int, ...]:
        """Tokens that close an assistant turn, the last one special; empty if plain text closes it.

        There are several only if the template puts white space before its special token, or the
        model's end token comes after another special one. If the template closes a turn by the
        beginning of the next one, this is the token of a user's message, provided that it ends the
        model's output.
        """
        final = self._tokenizer.encode(self.end_of_turn)
        following = self.delta(_QUESTIONS[1])
        # some templates end the last turn of all with more
        shared = final[: common_length(final, following)]
        if closing := self._end_tokens(shared) or self._end_tokens(final):
            return closing
        next_turn = self.ending("user")
        is_end = (
            not self.end_of_turn.strip()
            and next_turn
            and next_turn[-1] in self._tokenizer.eos_token_ids
        )
        return next_turn if is_end else ()

    def ending(self, role: Role) -> tuple[int, ...]:
        """Return the tokens at the beginning of ``delta`` that close the turn before; empty if
        plain text closes it.
        """
        if role not in self._endings:
            self._endings[role] = self._end_tokens(self.delta(_QUESTIONS[1], role))
        return self._endings[role]

    def is_closed(self, last_token: int, role: Role) -> bool:
        """Return whether a turn that ends with this token needs no ``ending`` before a message of
        the role.
        """
        own_end = self.end_of_turn_id if self.end_of_turn.strip() else None
        return last_token in (own_end, *self.ending(role)[-1:])

    def _end_tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens through the model's end token, else the first special one, if only
        white space precedes.
        """
        first = None
        for index, token in enumerate(ids):
            if self._tokenizer.is_special(token):
                if token in self._tokenizer.eos_token_ids:
                    return tuple(ids[: index + 1])
                first = index if first is None else first
            elif self._tokenizer.decode([token]).strip():
                break
        return () if first is None else tuple(ids[: first + 1])

    @cached_property
    def end_of_turn_id(self) -> int | None:
        return self.closing[-1] if self.closing else None

    @cached_property
    def reader(self) -> TurnReader:
        """Reads sampled turns as text."""
        question = [_user_message(_QUESTIONS[0])]
        turn = _text_before(
            self._render([*question, _assistant_message(_ANSWERS[0])], prompt=False), _ANSWERS[0]
        )
        header = (
            turn.removeprefix(prompt) if turn.startswith(prompt := self._render(question)) else ""
        )
        return TurnReader(self._tokenizer, self._tokenizer.encode(header))

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        own = set(self._tokenizer.eos_token_ids)
        return tuple(
            sorted(own | ({self.end_of_turn_id} if self.end_of_turn_id is not None else set()))
        )

    def _render(self, messages: Chat, *, prompt: bool = True, bare: bool = False) -> str:
        """Render messages; ``bare`` leaves out what the conversation begins with."""
        opening, tools = ([], []) if bare else ([*self._system, *self._examples], self._tools)
        return self._tokenizer.render_chat(
            [*opening, *messages], add_generation_prompt=prompt, tools=tools
        )

    def _tail(self, text: str, *, bare: bool) -> str:
        return _text_after(
            self._render(
                [
                    _user_message(_QUESTIONS[0]),
                    _assistant_message(_ANSWERS[0]),
                    _user_message(text),
                ],
                bare=bare,
            ),
            _ANSWERS[0],
        )

    def _check(self) -> None:
        first, second, third = _QUESTIONS
        first_answer, second_answer = _ANSWERS
        bare = self._moves_preamble
        opening, silent = (
            self._render([_user_message(first)], prompt=prompt, bare=bare)
            for prompt in (True, False)
        )
        short = self._render(
            [_user_message(first), _assistant_message(first_answer), _user_message(third)],
            bare=bare,
        )
        long = self._render(
            [
                _user_message(first),
                _assistant_message(first_answer),
                _user_message(second),
                _assistant_message(second_answer),
                _user_message(third),
            ],
            bare=bare,
        )
        for answer, rendered in (
            (first_answer, short),
            (first_answer, long),
            (second_answer, long),
        ):
            if rendered.count(answer) != 1:
                raise self._unstable(
                    "it does not render every assistant turn exactly once, unchanged"
                )
        if first not in opening or _text_before(opening, first) != _text_before(short, first):
            raise self._unstable("the beginning of a conversation changes when an answer follows")
        # A prompt may open the turn with more than a finished one has, such as a thinking tag, or
        # with less.
        prompt = _text_after(opening, first)
        turn = _text_before(_text_after(short, first), first_answer)
        if turn.strip() != prompt.strip() and (
            opening == silent or not prompt[: common_length(prompt, turn)].strip()
        ):
            raise self._unstable("it does not begin the assistant's turn after a user message")
        if third not in _text_after(short, first_answer):
            raise self._unstable("it does not render a user message that follows an answer")
        if _text_after(short, first_answer) != _text_after(long, second_answer):
            raise self._unstable("what it puts after an answer depends on earlier turns")
        if self._system and self._render([_user_message(first)]) == self._render(
            [_user_message(first)], bare=True
        ):
            raise self._unstable("it does not render the system message")

    def _unstable(self, problem: str) -> ConfigError:
        return self._rejected(f"does not support turn-by-turn conversations: {problem}")


@lru_cache(maxsize=64)
def rules_for(
    tokenizer: Tokenizer, system_prompt: str = "", tools: str = "", examples: Examples = ()
) -> TemplateRules:
    """Return the checked rules for a tokenizer, system prompt, set of tools (JSON) and examples;
    cached.
    """
    return TemplateRules(tokenizer, system_prompt, tools, examples)


@lru_cache(maxsize=8)
def channel_reader(tokenizer: Tokenizer) -> TurnReader | None:
    """Return the reader of a model that answers in channels, None for any other."""
    try:
        reader = rules_for(tokenizer).reader
    except ConfigError:
        # The template cannot be used turn by turn, or there is none.
        return None
    return reader if reader.has_channels else None


@lru_cache(maxsize=8)
def opens_thinking(tokenizer: Tokenizer) -> bool:
    """Return whether the generation prompt opens a block of reasoning, which answers then close."""
    try:
        prompt = tokenizer.render_chat([_user_message(_QUESTIONS[0])])
    except ConfigError:
        return False
    return is_open(_text_after(prompt, _QUESTIONS[0]))


@lru_cache(maxsize=8)
def takes_late_system(tokenizer: Tokenizer) -> bool:
    """Return whether the template shows a system message that follows a user's."""
    late = {"role": "system", "content": _QUESTIONS[1]}
    try:
        return _QUESTIONS[1] in tokenizer.render_chat([_user_message(_QUESTIONS[0]), late])
    except ConfigError:
        return False


def _user_message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant_message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _text_after(rendered: str, marker: str) -> str:
    return rendered.partition(marker)[2]


def _text_before(rendered: str, marker: str) -> str:
    return rendered.partition(marker)[0]
