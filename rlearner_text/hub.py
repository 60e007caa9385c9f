"""Finds a model's files in a folder or on the Hugging Face hub; imports no torch.

``NAME@REVISION`` names a commit, branch or tag of the hub. Only safetensors are downloaded and
loaded: other formats of weights are pickles, which run code.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.preflight import PreflightFinding

TOKENIZER_FILES: Final = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*",
)  # fmt: skip
# transformers' names of their tensors
STACKED_EXPERTS: Final = frozenset({"gate_up_proj", "down_proj"})
_ROUTERS: Final = frozenset({"gate", "router"})
_TOWER: Final = re.compile("vision|visual|audio")
_MAX_HEADER: Final = 100_000_000  # bytes, the format's limit
_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_PICKLE_PROBLEM: Final = (
    "is a pickle, which could run code, and is never loaded; "
    "convert it in a sandbox: load it with transformers, and save_pretrained writes safetensors"
)
_GGUF: Final = ".gguf"
# the oldest lack the owner
_HUB_NAME: Final = re.compile(r"(?:(?:\w|\w[\w.-]{0,94}\w)/)?(?:\w|\w[\w.-]{0,94}\w)")
_REVISION: Final = re.compile(r"\w[\w./-]{0,127}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_EXPECTED: Final = "give a Hugging Face model folder or hub name such as Qwen/Qwen3-0.6B"
# Content of a model's config.json or of another JSON file in its folder.
ModelConfig = dict[str, Any]


def is_local(path: str) -> bool:
    """Return whether a path means a local folder: it exists, or cannot be a hub name."""
    name, at, revision = path.partition("@")
    is_hub_name = _HUB_NAME.fullmatch(name) and (not at or _REVISION.fullmatch(revision))
    return Path(path).expanduser().exists() or not is_hub_name


def check_trust(path: str, key: str, *, trust_remote_code: bool) -> None:
    """Check that a hub model's code is that of one commit, so that nobody can replace it.

    Raises:
        ConfigError: if it is not; names the key.
    """
    if trust_remote_code and not is_local(path) and not _COMMIT.fullmatch(path.partition("@")[2]):
        name = path.partition("@")[0]
        raise ConfigError(
            key, path, f"with trust_remote_code name the commit: {name}@ and 40 hexadecimal digits"
        )


def tokenizer_folder(path: str, key: str = "model.path") -> Path:
    """Return the folder with the tokenizer's files; downloads them if they are not cached.

    Raises:
        ConfigError: if there is no such folder, or no such name on the hub and in the cache.
    """
    if is_local(path):
        folder = Path(path).expanduser()
        if not folder.is_dir():
            raise ConfigError(key, path, f"no such folder; {_EXPECTED}")
        return folder
    return Path(_download_files(path, key, TOKENIZER_FILES))


def model_folder(path: str, key: str = "model.path", *, trust_remote_code: bool = False) -> str:
    """Return the folder with a model's files; downloads them, without pickles, unless cached.

    Args:
        trust_remote_code: whether its Python files are needed, too.

    Raises:
        ConfigError: if there is no such name on the hub and in the cache, or its code is not that
            of one commit.
    """
    if is_local(path):
        return str(Path(path).expanduser())
    check_trust(path, key, trust_remote_code=trust_remote_code)
    code = ("*.py",) if trust_remote_code else ()
    return _download_files(path, key, (*TOKENIZER_FILES, "*.safetensors", "*.json", *code))


def check_model(path: str, key: str) -> None:
    """See ``rlearner_text.config.check_model_path``."""
    _refuse_file(path, key)
    if not is_local(path):
        read_json(Path(_download_files(path, key, ("config.json",))) / "config.json", path, key)
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(key, path, f"no such folder; {_EXPECTED}")
    quantized = next((file.name for file in sorted(folder.glob(f"*{_GGUF}"))), "")
    if quantized and next(folder.glob("*.safetensors"), None) is None:
        raise ConfigError(key, path, f"the folder holds {quantized}; {_gguf_remedy(quantized)}")
    if "model_type" not in read_json(folder / "config.json", path, key):
        raise ConfigError(key, path, f"its config.json names no model_type; {_EXPECTED}")
    if next(folder.glob("*.safetensors"), None) is not None:
        return
    pickled = next((file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))), "")
    if pickled:
        raise ConfigError(key, path, f"{pickled} {_PICKLE_PROBLEM}")
    if (folder / "learner" / "model.json").is_file():
        remedy = "`rlearner export` writes them in that format"
        raise ConfigError(
            key, path, f"the checkpoint of a large model holds its weights in parts: {remedy}"
        )
    raise ConfigError(key, path, f"the folder holds no weights (*.safetensors); {_EXPECTED}")


def _refuse_file(path: str, key: str) -> None:
    """Refuse the name of a file of weights where a folder is expected."""
    name = Path(path).name
    if name.lower().endswith(_GGUF):
        raise ConfigError(key, path, f"a GGUF file is not read; {_gguf_remedy(name)}")
    if (
        any(name.lower().endswith(pattern.removeprefix("*")) for pattern in _PICKLED)
        and not Path(path).is_dir()
    ):
        raise ConfigError(key, path, f"the file {_PICKLE_PROBLEM}")
    if Path(path).expanduser().is_file():
        raise ConfigError(key, path, f"it is a file; {_EXPECTED}")


def _gguf_remedy(name: str) -> str:
    convert = f"from_pretrained(FOLDER, gguf_file={name!r}) and save_pretrained(OUT)"
    return f"convert it once with transformers: {convert}, model and tokenizer, then give OUT"


def check_hub_name(path: str, key: str) -> list[PreflightFinding]:
    """Check whether a hub name resolves, in the cache or on the hub; empty for a folder."""
    if is_local(path):
        return []
    try:
        check_model(path, key)
    except ConfigError as error:
        problem = error.allowed.removesuffix(f"; {_EXPECTED}")
        remedy = f"hf download {path.replace('@', ' --revision ')}  # or a folder with the model"
        return [PreflightFinding("models", key, "missing", f"{path}: {problem}", remedy)]
    return [PreflightFinding("models", key, "ok", f"{path} is found")]


def layer_names(folder: Path) -> set[str] | None:
    """Return the last names of a language model's linear layers, from headers; None if unknown.

    Those of experts, which are stored one by one, are not among them: see ``expert_names``.
    """
    if (shapes := _stored_shapes(folder)) is None:
        return None
    names = set[str]()
    has_experts = bool(expert_names(folder))
    for name, shape in shapes.items():
        if _TOWER.search(name):
            continue
        parts = name.split(".")
        is_matrix = (
            parts[-1] == "weight" and len(shape) == 2 and any(part.isdigit() for part in parts[:-2])
        )
        if is_matrix and "experts" not in parts and not (has_experts and parts[-2] in _ROUTERS):
            names.add(parts[-2])
    return names or None


def expert_names(folder: Path) -> frozenset[str]:
    """Return transformers' names of the tensors that stack experts; empty without or unknown."""
    return (
        STACKED_EXPERTS
        if any("experts" in name.split(".") for name in _stored_shapes(folder) or ())
        else frozenset()
    )


def stored_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a model's files; empty if they cannot be read."""
    return list(_stored_shapes(folder) or ())


def _stored_shapes(folder: Path) -> dict[str, list[int]] | None:
    """Return the shapes of a model's tensors by name; None if a file cannot be read.

    A header is its length, 8 bytes little-endian, then JSON (github.com/huggingface/safetensors,
    README, "Format").
    """
    shapes: dict[str, list[int]] = {}
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                header = json.loads(
                    opened.read(min(int.from_bytes(opened.read(8), "little"), _MAX_HEADER))
                )
            header.pop("__metadata__", None)
            shapes |= {name: tensor["shape"] for name, tensor in header.items()}
        except (OSError, ValueError, AttributeError, KeyError, TypeError):
            # Loading the model reports the error.
            return None
    return shapes


def read_json(file: Path, path: str, key: str, *, missing_ok: bool = False) -> ModelConfig:
    """Read a JSON object from a model folder; empty if it is missing and ``missing_ok``.

    Raises:
        ConfigError: if it is missing, unreadable, or not a JSON object.
    """
    if missing_ok and not file.exists():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(key, path, f"the folder has no {file.name}; {_EXPECTED}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"{file.name} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(key, path, f"{file.name} is not a JSON object; {_EXPECTED}")
    return value


def _download_files(name: str, key: str, patterns: tuple[str, ...]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        repository, _, revision = name.partition("@")
        return str(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(patterns))
        )
    except HFValidationError:
        raise ConfigError(
            key, name, f"it is neither a folder nor a hub name; {_EXPECTED}"
        ) from None
    except LocalEntryNotFoundError:
        problem = "no such folder here, not in the hub's cache, and the hub cannot be reached"
    except OSError as error:
        # All errors from the hub's answer are OSErrors.
        problem = (
            f"no such folder here, and the hub answered {type(error).__name__}: "
            f"{_first_line(error)}"
        )
    raise ConfigError(key, name, f"{problem}; {_EXPECTED}") from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "nothing")


def copy_tokenizer(path: str, target: Path) -> None:
    """Copy tokenizer, chat template and generation config of a model into a folder, byte for byte.

    Raises:
        ConfigError: if there is no such model.
    """
    source = tokenizer_folder(path)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            if file.name != "config.json":
                copy = target / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)
