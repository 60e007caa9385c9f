"""Renders a model's Jinja chat template like transformers, without importing it (and torch)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from broker.errors import ConfigError

PLAIN: Final = "plain"
# For base models, which continue text: roles are words, and the model's own end token ends an
# answer. The generation prompt has no space at its end, because most vocabularies join a space with
# the word that follows.
_PLAIN_SOURCE: Final = (
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{- message['content'] + '\\n\\n' }}"
    "{%- elif message['role'] == 'user' %}{{- 'User: ' + message['content'] + '\\n' }}"
    "{%- elif message['role'] == 'assistant' %}{{- 'Assistant: ' + message['content'] + "
    "eos_token + '\\n' }}"
    "{%- else %}{{- raise_exception('plain has the roles system, user and assistant') }}{%- "
    "endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"
)
TEMPLATE_KEY: Final = "model.chat_template"
TEMPLATE_FILE: Final = "chat_template.jinja"  # in a model's folder
MAX_TEMPLATE_BYTES: Final = 1 << 20  # published ones have up to 30 kB

Chat = Sequence[Mapping[str, Any]]  # [{"role": …, "content": …}, …]


class _GenerationBlocks(Extension):
    """Renders the body of ``{% generation %}…{% endgeneration %}``, with which transformers finds
    assistant tokens.
    """

    tags = {"generation"}  # noqa: RUF012 - a plain attribute in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse_template(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the model's input.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _build_environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationBlocks, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse_template
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """A model's compiled chat template; it may use special tokens, such as ``bos_token``."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], error: Callable[[str], ConfigError]
    ) -> None:
        """Compile a template.

        Args:
            error: makes the error for a problem, which continues a sentence about the template.
        """
        self.source = source
        self._tokens = dict(special_tokens)
        self._error = error
        try:
            self._template = _build_environment().from_string(source)
        except jinja2.TemplateError as problem:
            raise error(f"does not parse: {problem}") from None

    def render(
        self,
        messages: Chat,
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Render a conversation as one string; ``tools`` are JSON schemas in OpenAI's form.

        Raises:
            ConfigError: if the template rejects these messages, for example a system message.
        """
        values = {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return self._template.render(
                **values, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except Exception as error:  # noqa: BLE001 - a template's code can raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise self._error(
                f"rejects messages of the roles {roles}: {_describe_error(error)}"
            ) from None


def _describe_error(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, jinja2.TemplateError)
        else f"{type(error).__name__}: {error}"
    )


def template_source(setting: str | None, *, opens_with_bos: bool = False) -> str | None:
    """Return the source of ``model.chat_template`` in a resolved configuration; opens no file.

    Args:
        opens_with_bos: whether the tokenizer itself puts its bos token in front of a text; then
            ``plain`` does, too.

    Raises:
        ConfigError: if it is neither null, ``plain`` nor the text of a template.
    """
    if setting is None or is_template(setting):
        return setting
    if setting == PLAIN:
        return "{{- bos_token }}" + _PLAIN_SOURCE if opens_with_bos else _PLAIN_SOURCE
    raise ConfigError(
        TEMPLATE_KEY,
        setting,
        "plain, or the text of a template: only the process that starts a run reads the file",
    )


def is_template(text: str) -> bool:
    """Return whether a setting is the text of a template, not the name of a file."""
    return "{{" in text or "{%" in text


def read_template(setting: str | None) -> str | None:
    """Return ``model.chat_template`` with the text of its file, for every process of the run.

    Raises:
        ConfigError: if there is no such file, or it holds no template.
    """
    if setting is None or setting == PLAIN or is_template(setting):
        return setting
    key = TEMPLATE_KEY
    allowed = "plain, or a file with a Jinja chat template"
    try:
        data = Path(setting).expanduser().read_bytes()
        text = data.decode()
    except OSError as error:
        raise ConfigError(key, setting, f"{error.strerror or error}; {allowed}") from None
    except ValueError:
        raise ConfigError(key, setting, f"the file is not UTF-8; {allowed}") from None
    if len(data) > MAX_TEMPLATE_BYTES or not is_template(text):
        problem = (
            "is larger than 1 MiB" if len(data) > MAX_TEMPLATE_BYTES else "has neither {{ nor {%"
        )
        raise ConfigError(key, setting, f"the file {problem}; {allowed}")
    return text


def find_template(folder: Path, tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """Return the source of a folder's default chat template, or None; template files come first."""
    for file in (folder / TEMPLATE_FILE, folder / "additional_chat_templates" / "default.jinja"):
        if file.exists():
            return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        legacy = folder / "chat_template.json"
        template = (
            json.loads(legacy.read_text(encoding="utf-8")).get("chat_template")
            if legacy.exists()
            else None
        )
    if template is not None and not isinstance(template, str):
        raise ConfigError(
            "model.path",
            name,
            "chat_template in its tokenizer_config.json is neither a string nor a list of "
            "named strings",
        )
    return template
