"""Reads a configuration: a YAML file, the files it inherits, and ``key=value`` overrides."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from broker.errors import ConfigError, UserError
from broker.settings.secret import refuse_copied
from broker.settings.yaml_bombs import MAX_CHARACTERS, YamlBomb, compose_bounded

HERE_REFERENCE: Final = "${here}"
# How a configuration of the package is named from anywhere.
SHIPPED: Final = "configs/"
# In the folder of a run: resolved, with every value.
RUN_CONFIG: Final = "config.yaml"
Config = dict[str, Any]
_REFUSED: Final = "UserError raised while resolving interpolation: "
_PRESET = re.compile(r"[A-Za-z][\w+-]*")
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")


def load(
    path: str,
    overrides: Sequence[str] = (),
    *,
    of_run: Callable[[Config], Config] = lambda config: config,
) -> Config:
    """Read a YAML file with the files it inherits, apply overrides.

    The key ``inherit`` holds a relative file name, ``configs/NAME.yaml`` of the package, or a list
    of these.

    ``path`` may be the folder of a run, for its ``config.yaml``, with ``run.name`` and ``run.dir``
    set to the folder's current name; ``of_run`` transforms that before the overrides are applied.
    Later files win over earlier ones, a file over inherited ones, overrides over all. Mappings are
    merged, lists replaced. ``null`` removes a domain. ``${here}`` in a file is its folder.
    ``algorithm=<name>`` replaces the section by the preset ``configs/algorithm/<name>.yaml``;
    overrides after it change the preset.

    Raises:
        UserError: if a file is missing or malformed, an override is not ``key=value``, or an
            interpolation would copy a secret from the environment.
    """
    config = _read_config(locate(path), ())
    if (Path(path) / RUN_CONFIG).is_file():
        config = OmegaConf.create(of_run(_rename_run(config, Path(path).resolve())))
    for override in overrides:
        _apply_override(config, override)
    try:
        with _harmless_environment():
            plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {_one_line(error).removeprefix(_REFUSED)}") from None
    except RecursionError:
        raise UserError(f"{path}: an interpolation refers to itself") from None
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


@contextmanager
def _harmless_environment() -> Iterator[None]:
    """Let ``${oc.env:NAME}`` refuse secrets, however the name is written."""

    def env(name: Any, *default: Any, _node_: Any) -> Any:
        refuse_copied(_node_._get_full_key(None), str(name))
        return oc.env(str(name), *default)

    OmegaConf.register_resolver("oc.env", env, replace=True, annotation_validation="off")
    try:
        yield
    finally:
        OmegaConf.register_resolver("oc.env", oc.env, replace=True, annotation_validation="off")


def _rename_run(config: DictConfig, folder: Path) -> Config:
    """Return a run's settings with its folder's name and parent."""
    # A configuration is a mapping at the top, so its container is a dict.
    settings: Config = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    parent = folder.parent
    working_folder = Path.cwd()
    if isinstance(run := settings.get("run"), dict):
        run |= {
            "name": folder.name,
            "dir": str(
                parent.relative_to(working_folder)
                if parent.is_relative_to(working_folder)
                else parent
            ),
        }
    return settings


def locate(path: str) -> Path:
    """Return a configuration's file: itself, in a run's folder, or from the package.

    Raises:
        UserError: if there is none.
    """
    for candidate in (Path(path), Path(path) / RUN_CONFIG):
        if candidate.is_file():
            return candidate
    if "=" in path:
        raise UserError(
            f"expected a YAML file, found {path!r}; give the file first, then the settings"
        )
    shipped = shipped_folder()
    name = path.removeprefix(SHIPPED)
    for candidate in (shipped / name, shipped / f"{name}.yaml"):
        if not Path(path).is_absolute() and candidate.is_file():
            return candidate
    if Path(path).is_dir():
        raise UserError(
            f"{path}: a folder without {RUN_CONFIG}; give a YAML file, or the folder of a run"
        )
    close = difflib.get_close_matches(name.removesuffix(".yaml"), shipped_names(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UserError(f"{path}: no such file; {hint}the package has {', '.join(shipped_names())}")


def shipped_names() -> list[str]:
    """Return the names of the configurations that come with the package, by which commands find
    them.
    """
    return sorted(file.stem for file in shipped_folder().glob("*.yaml"))


def shipped_folder() -> Path:
    """Return the folder of the configurations that come with the package: ``rlearner/configs`` of
    an installed wheel, ``configs`` next to ``rlearner`` in a clone and for an editable install.
    """
    package = Path(str(resources.files("rlearner")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _read_config(path: Path, inheriting: tuple[Path, ...]) -> DictConfig:
    path = path.resolve()
    if path in inheriting:
        raise UserError(
            f"{path}: inherits itself through "
            f"{' -> '.join(file.name for file in (*inheriting, path))}"
        )
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
        _check_keys(path, compose_bounded(text), "")
        plain = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
        own = OmegaConf.create(_place_here(plain, str(path.parent)))
    except YamlBomb as error:
        raise UserError(f"{path}: not a configuration: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: not valid YAML: {error.problem}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not valid YAML: byte {error.start} is not UTF-8") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: {_one_line(error)}") from None
    if not isinstance(own, DictConfig):
        raise UserError(f"{path}: expected a mapping of sections at the top")
    parents = own.pop("inherit", [])
    if not isinstance(parents, str) and not (isinstance(parents, ListConfig) or parents == []):
        raise UserError(
            f"{path}: inherit: {parents} is not allowed; a file name relative to this one, or a "
            "list of them"
        )
    names = [parents] if isinstance(parents, str) else list(parents)
    merged = OmegaConf.create({})
    for name in names:
        parent = path.parent / str(name)
        if not parent.is_file() and str(name).startswith(SHIPPED):  # as on the command line
            parent = shipped_folder() / str(name).removeprefix(SHIPPED)
        if not parent.is_file():
            raise UserError(f"{path}: inherit: {name!r}: no such file {parent}")
        merged = _merge_configs(merged, _read_config(parent, (*inheriting, path)), path)
    return _merge_configs(merged, own, path)


def _check_keys(path: Path, node: yaml.Node | None, prefix: str) -> None:
    """Check that no key occurs twice or without a value, which would replace a default.

    Args:
        prefix: the key of ``node``, empty at the top.

    Raises:
        UserError: if one is; names the file, the line and the key.
    """
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            _check_keys(path, item, f"{prefix}.{number}")
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        name = f"{prefix}.{key.value}".lstrip(".")
        line = key.start_mark.line + 1
        if name in first:
            raise UserError(
                f"{path}:{line}: {name} is given twice, first in line {first[name]}; keep one of "
                "them"
            )
        first[name] = line
        if isinstance(value, yaml.ScalarNode) and value.style is None and not value.value:
            raise UserError(
                f"{path}:{line}: {name} has no value; give one, write null, or remove the key"
            )
        _check_keys(path, value, name)


def _place_here(value: Any, folder: str) -> Any:
    """Return plain values with ``${here}`` replaced by the folder of their file."""
    if isinstance(value, dict):
        return {key: _place_here(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [_place_here(item, folder) for item in value]
    return value.replace(HERE_REFERENCE, folder) if isinstance(value, str) else value


def _merge_configs(base: DictConfig, top: DictConfig, path: Path) -> DictConfig:
    try:
        merged = OmegaConf.merge(base, top)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise UserError(f"{path}: {_one_line(error)}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _apply_override(config: DictConfig, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not _KEY.fullmatch(key):
        raise UserError(
            f"override {override!r} is not allowed; write key=value, for example train.steps=50"
        )
    if not text.strip():
        raise UserError(
            f"override {override!r} has no value; give one, or write {key}=null or {key}=\"''\""
        )
    try:
        compose_bounded(f"value: {text}")
        parsed = OmegaConf.create(f"value: {text}")
        values: Any = OmegaConf.to_container(parsed, resolve=False)
        value = values["value"]
        if key == "algorithm" and isinstance(value, str):
            config[key] = _read_preset(value)
        else:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (
        OmegaConfBaseException,
        yaml.YAMLError,
        RecursionError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        raise UserError(f"override {override!r} is not allowed; {_one_line(error)}") from None


def _read_preset(name: str) -> DictConfig:
    """Read the user's ``configs/algorithm/<name>.yaml``, or the one that comes with the package.

    Raises:
        ConfigError: if there is none; lists those that come with the package.
    """
    folder = shipped_folder() / "algorithm"
    candidates = (Path("configs", "algorithm", f"{name}.yaml"), folder / f"{name}.yaml")
    path = next((path for path in candidates if _PRESET.fullmatch(name) and path.is_file()), None)
    if path is None:
        raise ConfigError(
            "algorithm",
            name,
            f"known: {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))}",
        )
    return _read_config(path, ())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
