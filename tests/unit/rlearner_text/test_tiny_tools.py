"""Tools of the generated model: shown, called and answered; chats without them are as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlearner_text.config import TinyModel
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.template_rules import TemplateRules
from rlearner_text.tiny import tiny_tokenizer
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import ToolCall

ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {}}},
}
TOOLS = [{"type": "function", "function": function} for function in (ADD, {"name": "now"})]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CALL_TEXT = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
PARTS = {
    "chars": ("<|im_", "|>", "<|im_end|>"),
    "bpe": ("<|im_start|>", "\n", "<|im_end|>\n"),
}


@pytest.fixture(scope="module", params=PARTS)
def tiny(request: pytest.FixtureRequest) -> tuple[Tokenizer, tuple[str, str, str]]:
    corpus = str(Path(__file__))
    section = TinyModel(vocab=request.param, corpus=corpus, vocab_size=300)
    return tiny_tokenizer(section), PARTS[request.param]


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize(
    "chat",
    [
        [("user", "hi")],
        [("system", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", " a\n{b} ")],
        [("user", ""), ("assistant", "")],
    ],
)
def test_chats_without_tools(
    tiny: tuple[Tokenizer, tuple[str, str, str]], chat: list[tuple[str, str]], is_prompt: bool
) -> None:
    tokenizer, (opening, header, closing) = tiny
    messages = [{"role": role, "content": content} for role, content in chat]
    expected = "".join(f"{opening}{role}{header}{content}{closing}" for role, content in chat)
    expected += f"{opening}assistant{header}" * is_prompt
    assert tokenizer.render_chat(messages, add_generation_prompt=is_prompt) == expected
    # A vocabulary without another token: no model of former runs changes.
    assert tokenizer.vocab_size in (6 + 96, 300)


def test_a_conversation_with_tools(tiny: tuple[Tokenizer, tuple[str, str, str]]) -> None:
    tokenizer, (opening, header, closing) = tiny
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Sum."},
        {"role": "user", "content": "1 and 2?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    turns = [
        ("system", "add(a, b)\nnow()\n"),
        ("system", "Sum."),
        ("user", "1 and 2?"),
        ("assistant", CALL_TEXT),
        ("user", "3"),
        ("assistant", "It is 3."),
    ]
    text = "".join(f"{opening}{role}{header}{content}{closing}" for role, content in turns)
    assert tokenizer.render_chat(messages, add_generation_prompt=False, tools=TOOLS) == text

    conversation = Conversation(tokenizer, "Sum.", json.dumps(TOOLS))
    conversation.observe("1 and 2?")
    for ids, result in (
        (conversation.rules.answer("", [CALL]), "3"),
        (conversation.rules.answer("It is 3."), ""),
    ):
        conversation.sampled(ids, [0.0] * len(ids), [0, len(ids)])
        if result:
            conversation.observe(result, "tool")
    shown = tokenizer.decode(list(conversation.token_ids), skip_special_tokens=False)
    assert shown == text.removesuffix("\n")


def test_calls_are_read_back(tiny: tuple[Tokenizer, tuple[str, str, str]]) -> None:
    tokenizer, _ = tiny
    rules = TemplateRules(tokenizer, tools=json.dumps(TOOLS))
    added = ToolCall("add", {"a": 1, "b": 2})
    for calls in ([CALL], [CALL, CALL]):
        text = tokenizer.decode(rules.answer("", calls), skip_special_tokens=False)
        assert rules.calls(text) == [added] * len(calls)
    assert rules.calls("It is {3}.") == []
