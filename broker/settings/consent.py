"""Finds what a host must not accept of a configuration: a run's owner may be a stranger.

Each section and the arguments of each plug-in declare the fields that are harmless
(``Section.harmless``). All others run code or weaken isolation, or may do so in a later version;
they need an owner that the host trusts. Secrets need a rule of the host in any case.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_jsonable_python

from broker.contract import wire
from broker.errors import ConfigError, UserError
from broker.settings.config import DataMark, EndpointMark, PluginMark, Section, UserSettings
from broker.settings.host_rules import HostRules
from broker.settings.registry import resolve
from broker.settings.run_settings import NAMED_SECTIONS
from broker.settings.runspec import SECTIONS as ALL_SECTIONS
from broker.settings.secret import SecretRef
from broker.system.redaction import is_secret_name

# of those who join
SECTIONS: Final = (
    *NAMED_SECTIONS, "model", "rollout", "envhub", "rewardhub", "broker", "telemetry",
)  # fmt: skip
ISOLATION: Final = ("none", "thread", "process", "sandbox")  # the strictest last
MAX_LISTED: Final = 3

Need = Literal["trust", "endpoint", "data", "secret"]


@dataclass(frozen=True)
class Refusal:
    """A setting that this host does not accept.

    Attributes:
        need: what it would take.
        text: the file, the address, or the secret with its destination.
    """

    key: str
    need: Need
    text: str = ""


def check_consent(spec: wire.RunSpec, rules: HostRules, *, is_trusted: bool) -> None:
    """Check that this host accepts a run.

    Args:
        is_trusted: whether it trusts the run's owner to run code.

    Raises:
        UserError: if it does not; names the settings and the option that would allow them.
    """
    refusals = refused_settings(spec.config, rules, is_trusted=is_trusted)
    if not is_trusted:
        refusals += [
            Refusal("data_digests", "data", path)
            for path in spec.data_digests
            if not rules.allow_data(path)
        ]
        path = spec.model_path
        if path and not spec.model_files and os.path.exists(path) and not rules.allow_data(path):
            refusals.append(Refusal("model_path", "data", path))
    for need in ("trust", "endpoint", "data", "secret"):
        if kind := [refusal for refusal in refusals if refusal.need == need]:
            raise UserError(f"run {spec.run} {_format_refusals(kind)}")


def _format_refusals(refusals: list[Refusal]) -> str:
    first = refusals[0]
    keys = [
        f"{refusal.key}: {refusal.text}" if refusal.text else refusal.key
        for refusal in refusals[:MAX_LISTED]
    ]
    key_list = ", ".join(dict.fromkeys(keys))
    key_list += f" and {len(refusals) - MAX_LISTED} more" if len(refusals) > MAX_LISTED else ""
    if first.need == "trust":
        remedy = "add --trust-run-code once if you trust its owner with this account"
        return f"runs code of its own or weakens isolation ({key_list}); {remedy}"
    if first.need == "endpoint":
        remedy = (
            "allow the host with --allow-secret NAME=HOST, or trust the owner with --trust-run-code"
        )
        return f"lets this host send requests ({key_list}); {remedy}"
    if first.need == "data":
        remedy = (
            "name their folder with --allow-data FOLDER, or trust the owner with --trust-run-code"
        )
        return f"names files outside the folders that this host allows ({key_list}); {remedy}"
    return f"wants secrets of this host ({key_list}); --allow-secret NAME=HOST allows one"


def refused_settings(
    config: UserSettings, rules: HostRules, *, is_trusted: bool = False
) -> list[Refusal]:
    """Return the settings of a configuration that a host does not accept.

    Args:
        is_trusted: whether the host trusts the run's owner; only secrets are refused then.
    """
    secrets = [
        refusal for name in SECTIONS for refusal in _find_secrets(name, config.get(name), rules)
    ]
    if is_trusted:
        return secrets
    refusals: list[Refusal] = []
    for name in SECTIONS:
        value = config.get(name)
        model = _load_attribute(ALL_SECTIONS[name])
        if name in NAMED_SECTIONS and isinstance(value, Mapping):
            for entry, settings in value.items():
                if settings is not None:
                    refusals += _find_refusals(f"{name}.{entry}", model, settings, rules)
        elif value is not None:
            refusals += _find_refusals(name, model, value, rules)
    return refusals + secrets


def _find_refusals(
    key: str, model: type[Section], values: Any, rules: HostRules
) -> Iterator[Refusal]:
    """Find the fields of a section that are neither harmless nor at their default."""
    if not isinstance(values, Mapping):
        yield Refusal(key, "trust")
        return
    plugins = {
        mark.args: (name, mark)
        for name, field in model.model_fields.items()
        for mark in _field_marks(field)
        if isinstance(mark, PluginMark) and mark.args
    }
    for name, value in values.items():
        place = f"{key}.{name}"
        field = model.model_fields.get(str(name))
        if field is None:
            yield Refusal(place, "trust")
        elif name in plugins:
            source, mark = plugins[name]
            plugin = values.get(source, model.model_fields[source].default)
            args = _plugin_arguments(mark, plugin)
            # Else the name is refused.
            if args is not None and args.harmless is not None:
                yield from _find_refusals(place, args, value, rules)
        elif value == _default_of(field):
            continue
        elif name == "isolation":
            if not _is_isolated(values.get("env"), value):
                yield Refusal(place, "trust")
        else:
            yield from _check_value(place, model, field, value, rules)


def _check_value(
    key: str, model: type[Section], field: FieldInfo, value: Any, rules: HostRules
) -> Iterator[Refusal]:
    """Judge a value that is not the default."""
    for mark in _field_marks(field):
        if isinstance(mark, PluginMark):
            if not isinstance(value, str) or ":" in value or not _is_harmless_plugin(mark, value):
                yield Refusal(key, "trust")
            return
        if isinstance(mark, EndpointMark):
            if not isinstance(value, str) or not rules.allow_requests(value):
                yield Refusal(key, "endpoint", str(value))
            return
        if isinstance(mark, DataMark):
            path = os.path.expanduser(value) if isinstance(value, str) else ""
            is_missing = mark.may_be_missing and "\0" not in path and not os.path.lexists(path)
            if not path or not (is_missing or rules.allow_data(path)):
                yield Refusal(key, "data", str(value))
            return
    section = _section_of(field.annotation)
    if section is SecretRef:
        # Judged by ``_find_secrets``.
        return
    if section is None:
        if key.rpartition(".")[2] not in (model.harmless or ()):
            yield Refusal(key, "trust")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _find_refusals(f"{key}.{number}", section, item, rules)
    else:
        yield from _find_refusals(key, section, value, rules)


def _find_secrets(
    key: str, value: Any, rules: HostRules, name: str = "", *, headers_url: str = ""
) -> Iterator[Refusal]:
    """Find the references to secrets that the host's rules do not allow.

    Args:
        name: of the mapping that holds ``value``, for those whose every key may be a secret
            (``env``, ``headers``).
        headers_url: where ``value`` is sent, if it holds headers.
    """
    if isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _find_secrets(f"{key}.{number}", item, rules, name)
        return
    if not isinstance(value, Mapping):
        return
    base_url = value.get("base_url")
    url = base_url if isinstance(base_url, str) else headers_url
    own_url = value.get("url")
    for part, item in value.items():
        place = f"{key}.{part}"
        may_be_secret = is_secret_name(str(part)) or name in ("env", "headers")
        if may_be_secret and (source := _secret_source(item)):
            # a key of its own server, such as retriever_api_key
            server = value.get(str(part).removesuffix("_api_key"))
            target = server if isinstance(server, str) else url
            if not rules.allow_secret(source, target):
                yield Refusal(place, "secret", f"{source} for {target or 'code of the run'}")
        else:
            is_sent = part == "headers" and isinstance(own_url, str)
            target = str(own_url) if is_sent else ""
            yield from _find_secrets(place, item, rules, str(part), headers_url=target)


def _secret_source(value: Any) -> str:
    """Return the variable or the absolute path in a reference to a secret, empty if it is none."""
    if not isinstance(value, Mapping) or not value or not set(value) <= {"env", "file"}:
        return ""
    try:
        return SecretRef.model_validate(dict(value)).source
    except ValueError:
        return ""


def _plugin_arguments(mark: PluginMark, name: Any) -> type[Section] | None:
    """Return a registered plug-in's arguments; None: not declared, so it needs trust."""
    if not isinstance(name, str) or ":" in name:
        return None
    try:
        plugin = resolve(mark.kind, name, _load_attribute(mark.table))
    except ConfigError:
        return None
    args = plugin if mark.kind == "engines" else getattr(plugin, "Args", None)
    return args if isinstance(args, type) and issubclass(args, Section) else None


def _is_harmless_plugin(mark: PluginMark, name: str) -> bool:
    if not mark.table:
        return True
    args = _plugin_arguments(mark, name)
    return args is not None and args.harmless is not None


def _is_isolated(environment: Any, isolation: Any) -> bool:
    """Return whether this isolation of an environment is at least as strict as its own."""
    if isolation not in ISOLATION or not isinstance(environment, str) or ":" in environment:
        return False
    try:
        plugin = resolve("envs", environment, _load_attribute("envhub.envs:ENVS"))
    except ConfigError:
        return False
    own = getattr(plugin, "isolation", ISOLATION[-1])
    return own in ISOLATION and ISOLATION.index(isolation) >= ISOLATION.index(own)


def _default_of(field: FieldInfo) -> Any:
    """Return the default as a resolved configuration has it; without one, equal to nothing."""
    if field.is_required():
        return object()
    try:
        return to_jsonable_python(field.get_default(call_default_factory=True))
    except PydanticSerializationError:
        return object()


def _field_marks(field: FieldInfo) -> list[Any]:
    return [*field.metadata, *_nested_marks(field.annotation)]


def _nested_marks(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) is Annotated:
        yield from annotation.__metadata__
    for argument in get_args(annotation):
        yield from _nested_marks(argument)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, alone, optional or in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) is dict:
        return None
    return next(
        (section for argument in get_args(annotation) if (section := _section_of(argument))), None
    )


def _load_attribute(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)
