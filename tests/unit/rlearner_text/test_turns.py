"""A rendered conversation is taken apart into the messages that it was made of, for every family of
templates.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from template_models import make_tokenizer_folder

from broker.errors import ConfigError
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.turn_splitter import TurnSplitter

SYSTEM = "Answer\nin one word."
ASKED = ("Where is\nthe goal?", "And now?", "Then?")
SAID = ("row 3", "column 2")


def load(folder: Path, family: str) -> Tokenizer:
    return Tokenizer.load(make_tokenizer_folder(folder, family))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama3", "gemma", "r1", "marked", "plain"])
def test_a_conversation_grown_token_by_token_is_taken_apart(tmp_path: Path, family: str) -> None:
    tokenizer = load(tmp_path, family)
    system = "" if family == "gemma" else SYSTEM
    conversation = Conversation(tokenizer, system)
    splitter = TurnSplitter(tokenizer.render_chat)
    expected = [{"role": "system", "content": system}] if system else []
    for asked, said in zip(ASKED, (*SAID, ""), strict=True):
        conversation.observe(asked)
        expected.append({"role": "user", "content": asked})
        found = splitter.split(tokenizer.decode(conversation.token_ids, skip_special_tokens=False))
        assert found is not None
        assert [one["role"] for one in found] == [one["role"] for one in expected]
        assert [one["content"].strip() for one in found] == [one["content"] for one in expected]
        ids = tokenizer.encode(said)
        conversation.sampled(ids, [-1.0] * len(ids), [0, len(ids)] if ids else [])
        expected.append({"role": "assistant", "content": said})


@pytest.mark.parametrize("family", ["qwen2", "llama3"])
def test_without_a_system_message_the_default_one_is_left_to_the_endpoint(
    tmp_path: Path, family: str
) -> None:
    tokenizer = load(tmp_path, family)
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    found = TurnSplitter(tokenizer.render_chat).split(text)
    assert found is not None
    assert [one for one in found if one["content"]] == [{"role": "user", "content": "hi"}]


def test_what_is_no_conversation(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "qwen3")
    splitter = TurnSplitter(tokenizer.render_chat)
    for text in (
        "",
        "The answer is",
        "<|im_start|>user\nhi<|im_end|>\n",
        "hi<|im_end|>\n<|im_start|>assistant\n",
    ):
        assert splitter.split(text) is None


def test_a_template_that_forgets_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.engine_args\.api: 'chat' is not allowed; .* use completions"
    ):
        TurnSplitter(load(tmp_path, "amnesia").render_chat)
