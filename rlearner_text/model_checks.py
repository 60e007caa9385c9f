"""Checks a model that is to be trained before anything starts: one function for each rule.

``rlearner check``, ``doctor``, ``plan`` and every command that trains or measures a model call
``check_trained_model``. Nothing here imports torch or transformers, except for a folder without
``tokenizer.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from broker.errors import ConfigError
from broker.settings.config import DomainSection
from rlearner_text.chat_template import TEMPLATE_KEY, read_template, template_source
from rlearner_text.config import ModelSection, check_model_path
from rlearner_text.hub import ModelConfig, check_trust, is_local, read_json, tokenizer_folder
from rlearner_text.model_trial import try_model
from rlearner_text.tokenizer import Tokenizer

KEY: Final = "model.path"
_TOKENIZERS: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "spiece.model",
)
_NAMED_TYPE: Final = re.compile(r'"([\w.-]+)"[,:]\s*"\w+Config"')
_TYPE_FILES: Final = ("auto_mappings.py", "configuration_auto.py")
# transformers has 700; fewer were found if its files look different.
_FEWEST_TYPES: Final = 100
_QUANTIZED_FILES: Final = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_QUANTIZED_NAMES: Final = {
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "mxfp4": "MXFP4",
}
_TEXT_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_LISTED: Final = 3


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        folder: with its configuration and tokenizer.
        path: the setting ``model.path``, for error messages.
        content: of config.json.
    """

    folder: Path
    path: str
    content: ModelConfig

    @property
    def text_config(self) -> ModelConfig:
        """The part of ``content`` about the language model."""
        return self.content.get("text_config") or self.content

    def refused(self, problem: str) -> ConfigError:
        return ConfigError(KEY, self.path, problem)


def resolve_model(model: ModelSection) -> ModelSection:
    """Check a section ``model``, and return it with the text of the file that ``chat_template``
    names.

    So the template travels in the run's configuration, and no other host opens a file.

    Raises:
        ConfigError: see ``read_template`` and ``check_trained_model``.
    """
    setting = model.chat_template
    resolved = model.model_copy(update={"chat_template": read_template(setting)})
    try:
        check_trained_model(resolved)
    except ConfigError as error:
        if error.key != TEMPLATE_KEY:
            raise
        raise ConfigError(TEMPLATE_KEY, setting, error.allowed) from None
    return resolved


def check_trained_model(
    model: ModelSection,
    *,
    has_weights: bool = True,
    from_hub: bool = False,
    is_trained: bool = True,
) -> Tokenizer | None:
    """Check the model of a section ``model``; return its tokenizer, None if there is none yet.

    Args:
        model: a model without ``path`` is made later, and only its tokenizer is checked.
        has_weights: whether the folder must have weights.
        from_hub: whether to download the configuration and tokenizer of a hub name.
        is_trained: False for a model that is only measured, which may be quantized.

    Raises:
        ConfigError: for the first rule that the model breaks, in one line.
    """
    if (path := model.path) is None:
        return check_tiny_tokenizer(model)
    check_trust(path, KEY, trust_remote_code=model.trust_remote_code)
    if not from_hub and not is_local(path):
        return None
    if has_weights:
        check_model_path(path)
    folder = tokenizer_folder(path)
    files = ModelFiles(folder, path, read_json(folder / "config.json", path, KEY))
    check_type(files, trust_remote_code=model.trust_remote_code)
    if is_trained:
        check_unquantized(files)
    if not has_tokenizer(files) and not has_weights:
        return None
    check_has_tokenizer(files)
    trusted = model.trust_remote_code
    template = model.chat_template
    try_model(folder, path, chat_template=template)
    tokenizer = Tokenizer.load(path, trust_remote_code=trusted, chat_template=template)
    check_vocabulary(files, tokenizer)
    check_end_tokens(files, tokenizer)
    check_template(tokenizer)
    return tokenizer


def check_tiny_tokenizer(section: ModelSection) -> Tokenizer | None:
    """Check the chat template of a new model; return its tokenizer, None if it needs a corpus.

    Raises:
        ConfigError: if ``chat_template`` cannot be used.
    """
    from rlearner_text.tiny import tiny_tokenizer

    if section.tiny.vocab != "chars":
        template_source(section.chat_template)
        return None
    tokenizer = tiny_tokenizer(section.tiny, chat_template=section.chat_template)
    check_template(tokenizer)
    return tokenizer


def check_type(files: ModelFiles, *, trust_remote_code: bool) -> None:
    """Check that transformers knows the architecture, or the folder brings trusted code.

    Raises:
        ConfigError: if it does not.
    """
    name = files.content.get("model_type")
    types = known_types()
    if not isinstance(name, str) or types is None or name in types:
        return
    has_code = "auto_map" in files.content
    if has_code and trust_remote_code:
        return
    problem = (
        f"transformers {_package_version('transformers')} does not know the model_type {name!r} of "
        "its config.json"
    )
    remedy = (
        "set model.trust_remote_code to run its own code" if has_code else "use a version that does"
    )
    raise files.refused(f"{problem}; {remedy}")


def check_unquantized(files: ModelFiles) -> None:
    """Check that the weights are not quantized.

    Raises:
        ConfigError: if they are; names the method.
    """
    sections = [
        files.content.get("quantization_config"),
        files.text_config.get("quantization_config"),
    ]
    methods = [
        str(section.get("quant_method", "unknown"))
        for section in sections
        if isinstance(section, Mapping)
    ]
    methods += [
        method for file, method in _QUANTIZED_FILES.items() if (files.folder / file).exists()
    ]
    if methods:
        name = _QUANTIZED_NAMES.get(methods[0].lower(), methods[0])
        remedy = "give the model that it was made from, or save it dequantized with transformers"
        raise files.refused(
            f"its weights are quantized ({name}), and those are not trained; {remedy}"
        )


def has_tokenizer(files: ModelFiles) -> bool:
    """Return whether the folder has the file of any kind of tokenizer."""
    return any((files.folder / name).exists() for name in _TOKENIZERS)


def check_has_tokenizer(files: ModelFiles) -> None:
    """Check that the folder has a tokenizer.

    Raises:
        ConfigError: if it has none.
    """
    if not has_tokenizer(files):
        raise files.refused(
            f"the folder has no tokenizer ({_TOKENIZERS[0]}); copy it from the original model"
        )


def check_vocabulary(files: ModelFiles, tokenizer: Tokenizer) -> None:
    """Check that the embedding has a row for every token of text.

    Tokens that stand for images or sound may lie beyond it, as in Gemma 3 with 1 billion
    parameters.

    Raises:
        ConfigError: if it does not; names the first token beyond it.
    """
    size = files.text_config.get("vocab_size")
    if not isinstance(size, int):
        return
    media = _media_tokens(
        read_json(files.folder / "tokenizer_config.json", files.path, KEY, missing_ok=True)
    )
    beyond = {
        token: text
        for text, token in tokenizer.vocabulary().items()
        if token >= size and text not in media
    }
    if beyond:
        token = min(beyond)
        problem = (
            f"its tokenizer is larger than its embedding: token {token}, "
            f"{beyond[token]!r}, has no row of {size}"
        )
        remedy = "use the tokenizer of this model, or resize the embedding with transformers"
        raise files.refused(f"{problem}; {remedy}")


def check_end_tokens(files: ModelFiles, tokenizer: Tokenizer) -> None:
    """Check that the model has an end token. It may be the pad token, which is used nowhere.

    Raises:
        ConfigError: if it does not.
    """
    if not tokenizer.eos_token_ids:
        remedy = (
            "name eos_token in its tokenizer_config.json, or eos_token_id in its "
            "generation_config.json"
        )
        raise files.refused(f"it has no end token, so no answer would end; {remedy}")
    size = files.text_config.get("vocab_size")
    most = max(tokenizer.eos_token_ids)
    if isinstance(size, int) and most >= size:
        raise files.refused(
            f"its end token {most} has no row in its embedding of {size}; correct eos_token_id"
        )


def check_template(tokenizer: Tokenizer) -> None:
    """Check that there is a chat template, and that it renders a question.

    Raises:
        ConfigError: if there is none, it does not parse, or it raises an exception.
    """
    tokenizer.render_chat([{"role": "user", "content": "question"}])


def known_positions(model: ModelSection) -> int | None:
    """Return how many positions the model of a section ``model`` has; None if that is not known
    yet.

    Raises:
        ConfigError: if its config.json cannot be read.
    """
    path = model.path
    if path is None:
        return model.tiny.max_position_embeddings
    if is_local(path) and Path(path).expanduser().is_dir():
        config = read_json(Path(path).expanduser() / "config.json", path, KEY, missing_ok=True)
        positions = (config.get("text_config") or config).get("max_position_embeddings")
        return positions if isinstance(positions, int) else None
    return None


def sampling_note(model: ModelSection, domains: Mapping[str, DomainSection]) -> str:
    """Return a note about sampling settings of the model's own, which a run does not use; empty if
    there are none.
    """
    path = model.path
    if path is None or not is_local(path):
        return ""
    own = read_json(tokenizer_folder(path) / "generation_config.json", path, KEY, missing_ok=True)
    differing = [
        f"{name} {own[name]}"
        for name in _SAMPLING
        if own.get(name) is not None
        and any(getattr(domain.sampling, name, None) != own[name] for domain in domains.values())
    ]
    if not differing:
        return ""
    return (
        f"generation_config.json of {path} has {', '.join(differing)}; a run samples by "
        "domains.<name>.sampling"
    )


@lru_cache(maxsize=1)
def known_types() -> frozenset[str] | None:
    """Return the model types that the installed transformers knows, None if its files do not tell.

    They are read from its source, because its import takes seconds and torch.
    """
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "models" / "auto"
    try:
        sources = [
            file.read_text(encoding="utf-8")
            for file in folder.glob("*.py")
            if file.name in _TYPE_FILES
        ]
    except OSError:
        return None
    names = frozenset(name for source in sources for name in _NAMED_TYPE.findall(source))
    return names if len(names) >= _FEWEST_TYPES else None


def _media_tokens(config: ModelConfig) -> set[str]:
    """Return tokens that tokenizer_config.json names for something else than text, such as
    ``image_token``.
    """
    extra = config.get("extra_special_tokens")
    places: Iterable[Mapping[str, Any]] = (config, extra if isinstance(extra, Mapping) else {})
    token_ids = {
        key: value for place in places for key, value in place.items() if key.endswith("_token")
    }
    texts = {
        key: value.get("content") if isinstance(value, Mapping) else value
        for key, value in token_ids.items()
    }
    return {
        text for key, text in texts.items() if key not in _TEXT_TOKENS and isinstance(text, str)
    }


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"
