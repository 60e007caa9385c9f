"""Loads a tokenizer from a Hugging Face folder or hub name without torch, in about 0.1 s.

The ``tokenizers`` library reads ``tokenizer.json``. Only a folder without that file needs
transformers' AutoTokenizer, whose import costs seconds and 300 MB.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import tokenizers

from broker.errors import ConfigError, RlearnerError
from broker.settings.host_rules import enforced_rules
from broker.settings.schema.model import ModelSection
from rlearner_text.chat_template import (
    TEMPLATE_KEY,
    Chat,
    ChatTemplate,
    find_template,
    template_source,
)
from rlearner_text.hub import ModelConfig, read_json, tokenizer_folder
from rlearner_text.model_trial import try_model
from rlearner_text.special_text import CUT, encode_parts, shielder
from rlearner_text.transformers_import import import_transformers

# no text has more on average: a longer one does not fit, with any tokenizer
CHARS_PER_TOKEN: Final = 128
# Characters; encoding more takes so long that other threads must run.
LONG_TEXT: Final = 16_384
# threads of the library would make it warn at every fork
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# for each token of a limit: texts with fewer characters are encoded without a first look
CHARS_OF_SHORT: Final = 4
# The most by which a text has fewer tokens than its two halves.
JOINED_TOKENS: Final = 64
# tokens; decoded short texts are cached, because the answers of many episodes repeat
_SHORT: Final = 16
_SHORT_KEPT: Final = 4096
# Characters of a template in error messages.
_MAX_LISTED: Final = 40
_TOKEN_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class _Backend(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...
    def token_id(self, token: str) -> int | None: ...
    def size(self) -> int: ...
    def vocabulary(self) -> dict[str, int]: ...
    def special(self) -> list[str]: ...


class TokenizerError(RlearnerError):
    """The tokenizer library aborted on a text."""


def _as_exception(error: BaseException) -> BaseException:
    """Return the error itself, or an exception for a panic of the library, which is none."""
    if isinstance(error, Exception) or type(error).__name__ != "PanicException":
        return error
    return TokenizerError(f"the tokenizer aborted: {' '.join(str(error).split())[:200]}")


class _Fast:
    """tokenizer.json, plus the added tokens that only tokenizer_config.json lists."""

    def __init__(self, file: Path, config: ModelConfig) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
        for _, entry in sorted(added.items(), key=lambda item: int(item[0])):
            if self._tokenizer.token_to_id(entry["content"]) is None:
                flags = {name: entry[name] for name in _TOKEN_FLAGS if name in entry}
                self._tokenizer.add_tokens([tokenizers.AddedToken(entry["content"], **flags)])

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            if len(text) < LONG_TEXT:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            # unlike encode, this releases the interpreter's lock: 3 MB of spaces take seconds
            (encoding,) = self._tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return list(encoding.ids)
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            raise _as_exception(error) from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    def special(self) -> list[str]:
        return [
            added.content
            for added in self._tokenizer.get_added_tokens_decoder().values()
            if added.special
        ]


class _Auto:
    """transformers' AutoTokenizer, for folders without a tokenizer.json."""

    def __init__(self, folder: Path, name: str, trust_remote_code: bool, key: str) -> None:
        import_transformers()
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            problem = " ".join(str(error).split())[:300]
            raise ConfigError(
                key, name, f"it has no tokenizer that transformers can load: {problem}"
            ) from None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.get_vocab().get(token)
        return token_id

    def size(self) -> int:
        return len(self._tokenizer)

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def special(self) -> list[str]:
        added = [
            str(added_token)
            for added_token in self._tokenizer.added_tokens_decoder.values()
            if added_token.special
        ]
        return [*added, *self._tokenizer.all_special_tokens]


class Tokenizer:
    """Converts text to token ids and back, and knows the model's chat template and end tokens.

    Attributes:
        name: folder or hub name from which it is loaded.
        eos_token_ids: tokens that end the model's output, sorted; from generation_config.json, else
            config.json, and always the tokenizer's own eos token.
        pad_token_id: the pad token, else the first eos token, else 0.
        vocab_size: number of tokens in the tokenizer; the model's embedding may be larger.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        trust_remote_code: bool = False,
        key: str = "model.path",
        chat_template: str | None = None,
    ) -> None:
        self.name = name
        self._key = key
        config = read_json(folder / "tokenizer_config.json", name, key, missing_ok=True)
        file = folder / "tokenizer.json"
        self._backend: _Backend = (
            _load_fast(file, config, name, key)
            if file.exists()
            else _Auto(folder, name, trust_remote_code, key)
        )
        self._special = _named_tokens(
            config, read_json(folder / "special_tokens_map.json", name, key, missing_ok=True)
        )
        self._shield = shielder([*self._backend.special(), *self._special.values()])
        self.vocab_size = self._backend.size()
        self._decode_short = lru_cache(maxsize=_SHORT_KEPT)(self._backend.decode)
        self.eos_token_ids = self._find_eos(folder)
        pad = self._backend.token_id(self._special.get("pad_token", ""))
        self._own_template = template_source(
            chat_template, opens_with_bos=self._starts_with("bos_token")
        )
        self._template_source = self._own_template or find_template(folder, config, name)
        self.pad_token_id: int = pad if pad is not None else next(iter(self.eos_token_ids), 0)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        trust_remote_code: bool = False,
        key: str = "model.path",
        chat_template: str | None = None,
    ) -> Tokenizer:
        """Load from a folder or hub name.

        Args:
            key: the setting that names it.
            chat_template: replaces the model's own: ``plain`` or the text of a template, never the
                name of a file.

        Raises:
            ConfigError: if there is no such folder or hub name, it has no tokenizer, or
                ``chat_template`` is neither.
        """
        folder = tokenizer_folder(str(path), key)
        # The model of a run of another owner.
        if enforced_rules() is not None:
            try_model(folder, str(path), key=key, chat_template=chat_template)
        return cls(
            folder,
            str(path),
            trust_remote_code=trust_remote_code,
            key=key,
            chat_template=chat_template,
        )

    @classmethod
    def of_run(cls, path: str | Path, model: ModelSection) -> Tokenizer:
        """Load the tokenizer of a run's model, with its settings.

        Args:
            path: folder or hub name of the model on this host.

        Raises:
            ConfigError: as ``load``.
        """
        return cls.load(
            path, trust_remote_code=model.trust_remote_code, chat_template=model.chat_template
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of the text alone; special tokens spelled out in it are recognised,
        unless shielded.
        """
        return encode_parts(text, self._backend.encode)

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text certainly has more than ``limit`` tokens; encodes no more of it
        than that takes.
        """
        if len(text) <= CHARS_OF_SHORT * limit:
            return False
        count = 0
        for part in text.split(CUT):
            for start in range(0, len(part), LONG_TEXT):
                count += len(self._backend.encode(part[start : start + LONG_TEXT]))
                count -= JOINED_TOKENS if start else 0
                if count > limit:
                    return True
        return False

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of a text that stands inside another.

        Some tokenizers put a space before the first word of a text, but not before a word that
        follows a special token.
        """
        first = self._special.get("eos_token", "")
        # a special token may also take the white space around it
        if not first or not text or text[0].isspace():
            return self.encode(text)
        ids = self.encode(first + text)
        return ids[1:] if ids[0] == self._backend.token_id(first) else self.encode(text)

    def shield(self, text: str) -> str:
        """Return untrusted text marked so that ``encode`` gives no special token for what it spells
        out.

        Text that spells no special token returns unchanged. The marks are for ``encode`` only.
        """
        return self._shield(text)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the token ids."""
        token_ids = ids.tolist() if isinstance(ids, array) else [int(i) for i in ids]
        if len(token_ids) > _SHORT:
            return self._backend.decode(token_ids, skip_special_tokens)
        return self._decode_short(tuple(token_ids), skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its exact spelling, or None."""
        return self._backend.token_id(token)

    def is_special(self, token: int) -> bool:
        """Return whether a token is one that decoded text leaves out, such as the end of a turn."""
        return bool(self.decode([token], skip_special_tokens=False).strip()) and not self.decode(
            [token]
        )

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens by their spelling."""
        return self._backend.vocabulary()

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            ConfigError: if it has none.
        """
        if self._template_source is None:
            remedy = (
                "add a chat_template.jinja to the folder, or set model.chat_template to a "
                "file or plain"
            )
            raise ConfigError(self._key, self.name, f"its tokenizer has no chat template; {remedy}")
        return ChatTemplate(self._template_source, self._special, self.template_error)

    def template_error(self, problem: str) -> ConfigError:
        """Return the error for a chat template that cannot be used; ``problem`` continues a
        sentence about it.
        """
        if self._own_template is not None:
            return ConfigError(
                TEMPLATE_KEY, _first_words(self._own_template), f"the template {problem}"
            )
        return ConfigError("model.path", self.name, f"its chat template {problem}")

    def render_chat(
        self,
        messages: Chat,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation with the model's chat template."""
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )

    def encode_chat(self, messages: Chat, *, add_generation_prompt: bool = True) -> list[int]:
        """Return the token ids of a rendered conversation, like transformers'
        ``apply_chat_template``.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt))

    def _starts_with(self, kind: str) -> bool:
        """Return whether the tokenizer itself begins a text with a named token."""
        token = self._backend.token_id(self._special.get(kind, ""))
        return token is not None and self._backend.encode("", add_special_tokens=True)[:1] == [
            token
        ]

    def _find_eos(self, folder: Path) -> tuple[int, ...]:
        generation = read_json(
            folder / "generation_config.json", self.name, self._key, missing_ok=True
        )
        model = read_json(folder / "config.json", self.name, self._key, missing_ok=True)
        declared = generation.get("eos_token_id")
        if declared is None:
            declared = model.get(
                "eos_token_id", (model.get("text_config") or {}).get("eos_token_id")
            )
        ids = set(
            declared if isinstance(declared, list) else [] if declared is None else [declared]
        )
        own = self._backend.token_id(self._special.get("eos_token", ""))
        return tuple(sorted(ids | ({own} if own is not None else set())))


def _load_fast(file: Path, config: ModelConfig, name: str, key: str) -> _Fast:
    try:
        return _Fast(file, config)
    # the library raises plain Exception for a malformed file, or panics
    except BaseException as error:
        if not isinstance(problem := _as_exception(error), Exception):
            raise
        raise ConfigError(key, name, f"tokenizer.json cannot be read: {problem}") from None


def _named_tokens(config: ModelConfig, special_map: ModelConfig) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for kind in _NAMED_TOKENS:
        token = config.get(kind, special_map.get(kind))
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[kind] = token
    return tokens


def _first_words(template: str) -> str:
    words = " ".join(template.split())
    return words if len(words) <= _MAX_LISTED else f"{words[:_MAX_LISTED]}…"
