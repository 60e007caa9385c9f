"""Creates a small Qwen3 model with random weights and its own tokenizer, without any download."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from broker.errors import ConfigError
from rlearner_text.atomic_folders import atomic_folder
from rlearner_text.config import TinyModel
from rlearner_text.hub import ModelConfig
from rlearner_text.tokenizer import Tokenizer
from rlearner_text.transformers_import import import_transformers

PAD: Final = "<|endoftext|>"
UNKNOWN: Final = "<|unk|>"
END_OF_TURN: Final = "<|im_end|>"
# linear layers
LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CHARACTERS: Final = string.ascii_letters + string.digits + string.punctuation + " \n"

# Tools are shown as name(parameter, …), calls are JSON, and results are messages of the user.
_TEMPLATE: Final = (
    "{%- if tools %}{{- open('system') }}{%- for tool in tools %}"
    "{%- set parameters = (tool['function']['parameters'] or {})['properties'] | default({}) %}"
    "{{- tool['function']['name'] + '(' + parameters | join(', ') + ')\\n' }}"
    "{%- endfor %}{{- close }}{%- endif %}"
    "{%- for message in messages %}"
    "{{- open('user' if message['role'] == 'tool' else message['role']) }}"
    "{{- message['content'] or '' }}"
    "{%- if message['tool_calls'] %}"
    "{%- set calls = message['tool_calls'] | map(attribute='function') | list %}"
    "{{- (calls if calls | length > 1 else calls[0]) | tojson }}"
    "{%- endif %}{{- close }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- open('assistant') }}{%- endif %}"
)
# One token opens a message and names its role, so that a turn costs the small model as few tokens
# as possible.
_CHARS_SPECIAL: Final = (
    PAD,
    UNKNOWN,
    END_OF_TURN,
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
)
_CHARS_TEMPLATE: Final = (
    "{%- macro open(role) %}{{- '<|im_' + role + '|>' }}{%- endmacro %}"
    "{%- set close = '<|im_end|>' %}" + _TEMPLATE
)
_BPE_SPECIAL: Final = (PAD, "<|im_start|>", END_OF_TURN)
_BPE_TEMPLATE: Final = (
    "{%- macro open(role) %}{{- '<|im_start|>' + role + '\\n' }}{%- endmacro %}"
    "{%- set close = '<|im_end|>\\n' %}" + _TEMPLATE
)


def build_tiny(out: str | Path, tiny: TinyModel, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; replace it if it exists.

    The same settings and seed give the same bytes. ``dtype`` of the weights: float32, bfloat16 or
    float16.

    Raises:
        ConfigError: if the sizes are impossible, or a bpe vocabulary has no readable corpus.
    """
    check_tiny(tiny)
    with atomic_folder(out) as folder:
        _write_tokenizer(folder, tiny)
        _write_model(folder, tiny, seed, dtype)
    return Path(out)


def tiny_tokenizer(tiny: TinyModel, *, chat_template: str | None = None) -> Tokenizer:
    """Return the tokenizer of a model that is not built yet; that of a bpe vocabulary takes its
    corpus.

    Args:
        chat_template: see ``Tokenizer.load``.
    """
    with TemporaryDirectory() as folder:
        _write_tokenizer(Path(folder), tiny)
        tokenizer = Tokenizer.load(folder, chat_template=chat_template)
    tokenizer.name = "the model of model.tiny"
    return tokenizer


def check_tiny(tiny: TinyModel) -> None:
    """Reject impossible combinations without building anything.

    Raises:
        ConfigError: if one is impossible; names the key, its value and what is allowed.
    """
    if tiny.num_heads % tiny.num_kv_heads:
        raise ConfigError(
            "model.tiny.num_kv_heads",
            tiny.num_kv_heads,
            f"it must divide num_heads ({tiny.num_heads})",
        )
    if tiny.head_dim % 2:
        raise ConfigError(
            "model.tiny.head_dim", tiny.head_dim, "rotary positions need an even number"
        )
    for word in tiny.words:
        if (
            tiny.vocab != "chars"
            or len(word) < 2
            or not word.isprintable()
            or tiny.words.count(word) > 1
        ):
            raise ConfigError(
                "model.tiny.words",
                word,
                "use distinct texts of at least two printable characters, with vocab: chars",
            )
    if tiny.vocab == "bpe":
        if tiny.corpus is None or not Path(tiny.corpus).is_file():
            raise ConfigError(
                "model.tiny.corpus",
                tiny.corpus,
                "a bpe vocabulary needs an existing text file to train on",
            )
        if tiny.vocab_size < (smallest := 256 + len(_BPE_SPECIAL)):
            raise ConfigError(
                "model.tiny.vocab_size",
                tiny.vocab_size,
                f"a byte-level vocabulary has at least {smallest} tokens",
            )


def _write_tokenizer(folder: Path, tiny: TinyModel) -> None:
    tokenizer = _character_tokenizer(tiny.words) if tiny.vocab == "chars" else _bpe_tokenizer(tiny)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: ModelConfig = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PAD,
        "model_max_length": tiny.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    if tiny.vocab == "chars":
        config["unk_token"] = UNKNOWN
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )
    template = _CHARS_TEMPLATE if tiny.vocab == "chars" else _BPE_TEMPLATE
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _character_tokenizer(words: Sequence[str]) -> tokenizers.Tokenizer:
    # A BPE without merges makes every character a token and maps others to the unknown token.
    vocab = {token: index for index, token in enumerate((*_CHARS_SPECIAL, *CHARACTERS))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    special = [
        tokenizers.AddedToken(token, normalized=False, special=True) for token in _CHARS_SPECIAL
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(
        [tokenizers.AddedToken(word, normalized=False, special=False) for word in words]
    )
    return tokenizer


def _bpe_tokenizer(tiny: TinyModel) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=tiny.vocab_size,
        special_tokens=list(_BPE_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(tiny.corpus)], trainer)
    return tokenizer


def _write_model(folder: Path, tiny: TinyModel, seed: int, dtype: str) -> None:
    import torch

    import_transformers()
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    eos = tokenizer.token_to_id(END_OF_TURN)
    pad = tokenizer.token_to_id(PAD)
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(with_added_tokens=True),
        hidden_size=tiny.hidden_size,
        intermediate_size=tiny.intermediate_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        max_position_embeddings=tiny.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=[eos, pad], pad_token_id=pad
    )
    model.save_pretrained(folder)
