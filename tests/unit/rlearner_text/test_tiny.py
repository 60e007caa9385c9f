"""The small models made here are real Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from broker.errors import ConfigError
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.config import TinyModel, check_model_path
from rlearner_text.incremental_tokenization import Conversation
from rlearner_text.template_rules import TemplateRules
from rlearner_text.tiny import CHARACTERS, build_tiny, check_tiny, tiny_tokenizer
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.tool_calls import ToolCall

SMALL = TinyModel(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny") / "chars", SMALL, seed=3)


def test_every_printable_character_is_one_token(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for character in CHARACTERS:
        assert len(tokenizer.encode(character)) == 1
        assert tokenizer.decode(tokenizer.encode(character)) == character
    assert CHARACTERS.count("\n") == 1
    assert sorted(CHARACTERS.replace("\n", "")) == [chr(code) for code in range(32, 127)]
    assert len(tokenizer.encode("aé→b")) == 4
    assert tokenizer.decode(tokenizer.encode("aé→b")) == "ab"


def test_a_turn_costs_four_tokens_beside_its_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "U"}]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    assert len(ids) == 2 + 1 + 4
    assert (
        tokenizer.decode(ids, skip_special_tokens=False)
        == "<|im_user|>hi<|im_end|><|im_assistant|>U<|im_end|>"
    )


def test_transformers_loads_model_tokenizer_and_end_tokens(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_model_path(str(folder))
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    ours = Tokenizer.load(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer) == ours.vocab_size == 6 + 96
    assert model.generation_config.eos_token_id == [2, 0]
    assert ours.eos_token_ids == (0, 2)
    assert model.dtype == torch.float32
    text = "<|im_user|>Row 1: SF\nRow 2: HG<|im_end|>"
    assert tokenizer.encode(text, add_special_tokens=False) == ours.encode(text)
    with torch.no_grad():
        logits = model(torch.tensor([ours.encode(text)])).logits
    assert logits.shape == (1, 21, 102)
    # A fresh model knows nothing: its distribution is close to uniform.
    entropy = torch.distributions.Categorical(logits=logits[0, -1]).entropy().item()
    assert entropy == pytest.approx(torch.log(torch.tensor(102.0)).item(), abs=0.1)


def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = build_tiny(tmp_path / "again", SMALL, seed=3)
    other = build_tiny(tmp_path / "other", SMALL, seed=4)
    for file in sorted(p.name for p in folder.iterdir()):
        assert (again / file).read_bytes() == (folder / file).read_bytes()
    assert (other / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_bpe_vocabulary_is_trained_on_the_corpus(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("frozen lake frozen lake the goal\n" * 50)
    folder = build_tiny(
        tmp_path / "bpe",
        SMALL.model_copy(update={"vocab": "bpe", "vocab_size": 290, "corpus": str(corpus)}),
    )
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size <= 290
    assert len(tokenizer.encode("frozen lake")) < 5
    assert tokenizer.decode(tokenizer.encode("é → 冰")) == "é → 冰"
    assert tokenizer.decode(
        tokenizer.encode_chat([{"role": "user", "content": "hi"}]), skip_special_tokens=False
    ) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, "model.tiny.num_kv_heads"),
        ({"head_dim": 15}, "model.tiny.head_dim"),
        ({"vocab": "bpe"}, "model.tiny.corpus"),
        ({"vocab": "bpe", "corpus": __file__, "vocab_size": 100}, "model.tiny.vocab_size"),
    ],
)
def test_impossible_sizes_name_the_key(change: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tiny(SMALL.model_copy(update=change))
    assert caught.value.key == key


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_folder(target) as work:
        (work / "a").write_text("1")
        assert not target.exists()
    with pytest.raises(FileNotFoundError), atomic_folder(target) as work:
        (work / "missing" / "a").write_text("2")
    assert (target / "a").read_text() == "1"
    with atomic_folder(target) as work:
        (work / "b").write_text("3")
    assert [p.name for p in target.iterdir()] == ["b"]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_words_are_one_token_each_and_the_longest_wins(tmp_path: Path) -> None:
    tiny = SMALL.model_copy(update={"words": ["large", "x-large", "buy now", "click["]})
    tokenizer = Tokenizer.load(build_tiny(tmp_path / "words", tiny))
    assert [
        tokenizer.decode([token]) for token in tokenizer.encode("click[buy now]x-large enlarge")
    ] == [
        *("click[", "buy now", "]", "x-large", " ", "e", "n", "large"),
    ]
    assert tokenizer.vocab_size == 6 + 96 + 4
    for words in (["a"], ["red", "red"], ["a\nb"], [""]):
        with pytest.raises(ConfigError, match=r"model\.tiny\.words"):
            check_tiny(SMALL.model_copy(update={"words": words}))
    with pytest.raises(ConfigError, match=r"model\.tiny\.words"):
        check_tiny(SMALL.model_copy(update={"words": ["red"], "vocab": "bpe"}))


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
