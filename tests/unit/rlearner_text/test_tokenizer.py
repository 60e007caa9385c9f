"""The light tokenizer gives what transformers' AutoTokenizer gives, without importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from template_models import TEMPLATES, make_tokenizer_folder

from broker.errors import ConfigError
from rlearner_text.config import check_model_path
from rlearner_text.tokenizer import Tokenizer

CHATS = [
    [{"role": "user", "content": "What is 17 + 25?"}],
    [
        {"role": "user", "content": "  spaces\nand é→ \t marks "},
        {"role": "assistant", "content": "42"},
    ],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "<b>&'\"</b>"},
    ],
]
SYSTEM = {"role": "system", "content": " Answer briefly.\n"}


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_chat_rendering_equals_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer_folder(tmp_path / family, family)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    chats = CHATS if family == "gemma" else CHATS + [[SYSTEM, *chat] for chat in CHATS]
    for chat in chats:
        for prompt in (True, False):
            text = theirs.apply_chat_template(chat, add_generation_prompt=prompt, tokenize=False)
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt)["input_ids"]
            assert ours.render_chat(chat, add_generation_prompt=prompt) == text
            assert ours.encode_chat(chat, add_generation_prompt=prompt) == ids
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    assert ours.vocab_size == len(theirs)


def test_system_message_that_the_template_refuses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(make_tokenizer_folder(tmp_path / "g", "gemma"))
    with pytest.raises(
        ConfigError,
        match=r"model.path: .*rejects messages of the roles system, user: no system messages",
    ):
        tokenizer.encode_chat([SYSTEM, *CHATS[0]])


def test_end_tokens_come_from_generation_config_then_config_and_the_tokenizer(
    tmp_path: Path,
) -> None:
    folder = make_tokenizer_folder(tmp_path / "q", "qwen3")
    assert Tokenizer.load(folder).eos_token_ids == (2,)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert Tokenizer.load(folder).eos_token_ids == (0, 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    assert Tokenizer.load(folder).eos_token_ids == (1, 2)
    assert Tokenizer.load(folder).pad_token_id == 0


def test_added_tokens_that_only_the_config_knows(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer_folder(tmp_path / "q", "qwen3")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    size = Tokenizer.load(folder).vocab_size
    flags = {
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
    }
    config["added_tokens_decoder"] = {str(size): {"content": "<tool>", **flags}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(folder)
    assert ours.token_id("<tool>") == size
    text = "a<tool>b"
    assert ours.encode(text) == AutoTokenizer.from_pretrained(folder).encode(
        text, add_special_tokens=False
    )
    assert ours.decode(ours.encode(text)) == "ab"


def test_named_templates_use_the_default_one(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "q", "qwen2")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "rag", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).render_chat(CHATS[0]) == "What is 17 + 25?!"


def test_a_folder_without_tokenizer_json_goes_through_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "</s>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "unk_token": "</s>"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("abb") == [2, 1]
    assert tokenizer.decode([2, 1, 3]) == "abb"
    assert tokenizer.eos_token_ids == (3,)


def test_no_chat_template_is_said_in_one_line(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "p", "plain")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template; add a chat_template\.jinja"):
        Tokenizer.load(folder).encode_chat(CHATS[0])


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda f: f / "nowhere", "no such folder"),
        (lambda f: f, "has no config.json"),
        (lambda f: [(f / "config.json").write_text("{"), f][1], "config.json cannot be read"),
        (lambda f: [(f / "config.json").write_text("[]"), f][1], "is not a JSON object"),
        (lambda f: [(f / "config.json").write_text("{}"), f][1], "names no model_type"),
        (
            lambda f: [(f / "config.json").write_text('{"model_type": "qwen3"}'), f][1],
            "holds no weights",
        ),
        (lambda f: "not a/hub name", "no such folder"),
    ],
)
def test_a_path_that_is_no_model_is_one_line(tmp_path: Path, make: object, problem: str) -> None:
    path = str(make(tmp_path))  # type: ignore[operator]
    with pytest.raises(ConfigError) as caught:
        check_model_path(path)
    assert str(caught.value).startswith(f"model.path: {path!r} is not allowed; ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_broken_tokenizer_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "q", "qwen3")
    code = (
        "import sys\nfrom rlearner_text.tokenizer import Tokenizer\nfrom rlearner_text.incremental_tokenization import "
        "Conversation\n"
        f"c = Conversation(Tokenizer.load({str(folder)!r}), 'be brief')\nc.observe('hello')\n"
        "print(len(c), [m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.split(maxsplit=1)[1].strip() == "[]"
