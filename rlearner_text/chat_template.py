"""Renders a model's Jinja chat template like transformers, without importing it (and torch)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from broker.errors import ConfigError

Chat = Sequence[Mapping[str, Any]]  # [{"role": …, "content": …}, …]


class _GenerationBlocks(Extension):
    """Renders the body of ``{% generation %}…{% endgeneration %}``, with which transformers finds assistant tokens."""

    tags = {"generation"}  # noqa: RUF012 - a plain attribute in jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the model's input.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationBlocks, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


class ChatTemplate:
    """A compiled chat template of one model; templates may use its special tokens, such as ``bos_token``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], name: str) -> None:
        self.source, self._tokens, self._name = source, dict(special_tokens), name
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError("model.path", name, f"its chat template does not parse: {error}") from None

    def render(self, messages: Chat, *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation as one string; ``tools`` are JSON schemas in OpenAI's form.

        Raises:
            ConfigError: if the template rejects these messages, for example a system message.
        """
        values = {"messages": messages, "tools": tools or None, "documents": None}
        try:
            return self._template.render(**values, add_generation_prompt=add_generation_prompt, **self._tokens)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            problem = f"its chat template rejects messages of the roles {roles}: {error}"
            raise ConfigError("model.path", self._name, problem) from None


def find_template(folder: Path, tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """Return the source of a folder's default chat template, or None; template files take precedence."""
    for file in (folder / "chat_template.jinja", folder / "additional_chat_templates" / "default.jinja"):
        if file.exists():
            return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if template is None:
        legacy = folder / "chat_template.json"
        template = json.loads(legacy.read_text(encoding="utf-8")).get("chat_template") if legacy.exists() else None
    if template is not None and not isinstance(template, str):
        problem = "chat_template in its tokenizer_config.json is neither a string nor a list of named strings"
        raise ConfigError("model.path", name, problem)
    return template
