"""Resolves plug-ins by name: from a table, an entry point, a dotted path or a file."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from broker.errors import ConfigError
from broker.system import fault


def resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """Return the object that a plug-in's name refers to.

    Args:
        kind: kind of plug-in, for example ``engines``; names the entry-point group
            ``rlearner.<kind>``.
        name: a name in the table or of an entry point, ``package.module:attribute`` or
            ``path/to/file.py:attribute``.
        table: the registry, name to ``module:attribute``; modules are imported only when needed.

    Raises:
        ConfigError: if the name is unknown (lists the known ones), its module or file is missing or
            fails to import, or lacks the attribute.
    """
    if name in table:
        return _load_target(kind, name, table[name])
    if point := _entry_point(kind, name):
        return _load_target(kind, name, point.value)
    if ":" in name:
        return _load_target(kind, name, name)
    raise ConfigError(kind, name, _describe_known(kind, name, table))


def check_call(key: str, name: str, target: Any, parameters: Sequence[str]) -> None:
    """Check that an object can be called with these arguments.

    Args:
        key: the setting that names it.
        parameters: names of the arguments, for messages.

    Raises:
        ConfigError: if it cannot; names the expected and the found parameters.
    """
    expected = f"it must be a function of ({', '.join(parameters)}), and is "
    if not callable(target):
        raise ConfigError(key, name, f"{expected}an {type(target).__name__}")
    try:
        signature = inspect.signature(target)
    except ValueError:
        # Some callables written in C have no signature.
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        raise ConfigError(
            key, name, f"{expected}{getattr(target, '__name__', name)}{signature}"
        ) from None


def check_method(
    key: str,
    name: str,
    target: type,
    method: str,
    parameters: Sequence[str],
    *,
    base: type = object,
    purpose: str = "",
) -> None:
    """Check that a class has a method that takes these arguments.

    Args:
        key: the setting that names the class.
        parameters: names of the arguments, without ``self``.
        base: a class whose method of this name does not count.
        purpose: what needs the method, added to the message.

    Raises:
        ConfigError: if the method is missing or takes other arguments; names file and line.
    """
    expected = f"({', '.join(('self', *parameters))})"
    own = getattr(target, method, None)
    if not callable(own) or own is getattr(base, method, None):
        raise ConfigError(
            key,
            name,
            f"class {target.__name__}{_source_place(target)} has no method "
            f"{method}{expected}{purpose}",
        )
    is_static = isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod))
    try:
        signature = inspect.signature(own)
        signature.bind(*(() if is_static else ("self",)), *parameters)
    except ValueError:
        # Some callables written in C have no signature.
        return
    except TypeError:
        raise ConfigError(
            key, name, f"{method}{signature}{_source_place(own)} must take {expected}"
        ) from None


def _source_place(target: Any) -> str:
    """Return `` (my_env.py:12)``, or nothing if there is no source."""
    try:
        file = Path(inspect.getsourcefile(target) or "").name
        return f" ({file}:{inspect.getsourcelines(target)[1]})"
    except (OSError, TypeError):
        return ""


def known(kind: str, table: Mapping[str, str]) -> list[str]:
    """Return the names of the table and of the installed entry points, sorted."""
    return sorted({*table, *(point.name for point in entry_points(group=f"rlearner.{kind}"))})


def _entry_point(kind: str, name: str) -> EntryPoint | None:
    return next(iter(entry_points(group=f"rlearner.{kind}", name=name)), None)


def _describe_known(kind: str, name: str, table: Mapping[str, str]) -> str:
    if name.endswith(".py"):
        return f"add ':function' or ':Class', a name in that file: {name}:NAME"
    names = known(kind, table)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return (
        f"{hint}known: {', '.join(names) or 'none'}; or 'package.module:attribute', or "
        "'file.py:attribute'"
    )


def _load_target(kind: str, name: str, target: str) -> Any:
    source, _, attribute = target.rpartition(":")
    if not source or not attribute:
        raise ConfigError(kind, name, "write 'package.module:attribute' or 'file.py:attribute'")
    if source.endswith(".py"):
        module = _from_file(kind, name, Path(source))
    else:
        module = _from_path(kind, name, source)
    plugin: Any = module
    for part in attribute.split("."):
        if not hasattr(plugin, part):
            raise ConfigError(kind, name, f"{source} has no {attribute!r}")
        plugin = getattr(plugin, part)
    return plugin


def _from_path(kind: str, name: str, module: str) -> ModuleType:
    working_folder = str(Path.cwd())
    if working_folder not in sys.path and "" not in sys.path:
        sys.path.append(
            working_folder
        )  # last, so that a user's folder never shadows an installed package
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if module == missing or module.startswith(missing + "."):
            raise ConfigError(kind, name, f"there is no module {module!r}") from None
        raise ConfigError(
            kind, name, f"it needs the package {missing!r}, which is not installed"
        ) from None
    # a script that calls sys.exit must not silently end this process
    except (Exception, SystemExit) as error:
        raise ConfigError(kind, name, f"{module} fails to import: {fault.told(error)}") from error


def _from_file(kind: str, name: str, path: Path) -> ModuleType:
    if not path.is_file():
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise ConfigError(kind, name, f"there is no file {path}{place}")
    path = path.resolve()
    module_name = f"rlearner_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(kind, name, f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # before it runs: dataclasses and pickles of worker processes look it up
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(kind, name, f"{path} fails to import: {fault.told(error)}") from error
    return module
