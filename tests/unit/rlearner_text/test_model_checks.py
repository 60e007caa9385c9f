"""Models that cannot be trained are refused in one line; those that can pass."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_templates import STYLES, ModelStyle, make_style_folder

from broker.errors import ConfigError
from broker.settings.config import DomainSection
from broker.settings.run_settings import RunSettings
from rlearner_text.config import ModelSection
from rlearner_text.model_checks import (
    check_trained_model,
    known_types,
    resolve_model,
    sampling_note,
)
from rlearner_text.tokenizer import Tokenizer
from rollout import checks as rollout_checks
from rollout.config import RolloutSection

SIZE = 1000
TEMPLATE = "chat_template.jinja"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = make_style_folder(tmp_path / "model", STYLES["qwen3"])
    write(made, "config.json", {"model_type": "qwen3", "vocab_size": SIZE})
    (made / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return made


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def edit(folder: Path, name: str, **changes: Any) -> None:
    found = json.loads((folder / name).read_text())
    write(
        folder,
        name,
        {key: value for key, value in {**found, **changes}.items() if value is not None},
    )


def section(path: object, **settings: Any) -> ModelSection:
    return ModelSection(path=str(path), **settings)


def add_tokens(folder: Path, *texts: str) -> None:
    """Add special tokens to the tokenizer, and none to the embedding, which held all until now."""
    first = Tokenizer.load(folder).vocab_size
    edit(folder, "config.json", vocab_size=first)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    flags = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer["added_tokens"] += [
        {"id": first + n, "content": text, **flags} for n, text in enumerate(texts)
    ]
    write(folder, "tokenizer.json", tokenizer)


def no_end(folder: Path) -> None:
    edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, "tokenizer_config.json", eos_token=None)


def rename(folder: Path, name: str, to: str) -> None:
    (folder / name).rename(folder / to)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    (
        "gguf",
        lambda f: rename(f, "model.safetensors", "m.gguf"),
        "holds m.gguf; convert it once with transformers",
    ),
    (
        "pickle",
        lambda f: rename(f, "model.safetensors", "m.bin"),
        "m.bin is a pickle, which could run code",
    ),
    (
        "type",
        lambda f: edit(f, "config.json", model_type="qwen99"),
        "does not know the model_type 'qwen99'",
    ),
    (
        "code",
        lambda f: edit(f, "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "set model.trust_remote_code to run its own code",
    ),
    (
        "fp8",
        lambda f: edit(f, "config.json", quantization_config={"quant_method": "fp8"}),
        "are quantized (FP8)",
    ),
    (
        "gptq",
        lambda f: edit(f, "config.json", quantization_config={"quant_method": "gptq"}),
        "are quantized (GPTQ)",
    ),
    ("awq", lambda f: write(f, "quant_config.json", {"w_bit": 4}), "are quantized (AWQ)"),
    (
        "inner",
        lambda f: edit(
            f, "config.json", text_config={"quantization_config": {"quant_method": "awq"}}
        ),
        "are quantized (AWQ)",
    ),
    ("tokenizer", lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer (tokenizer.json)"),
    (
        "size",
        lambda f: edit(f, "config.json", vocab_size=200),
        "larger than its embedding: token 200, ",
    ),
    ("token", lambda f: add_tokens(f, "<extra>"), "'<extra>', has no row of "),
    ("end", no_end, "it has no end token, so no answer would end; name eos_token"),
    (
        "end-id",
        lambda f: edit(f, "generation_config.json", eos_token_id=[2, SIZE]),
        "its end token 1000 has no row in its embedding of 1000",
    ),
    (
        "no-template",
        lambda f: (f / TEMPLATE).unlink(),
        "no chat template; add a chat_template.jinja to the folder, or",
    ),
    (
        "broken",
        lambda f: (f / TEMPLATE).write_text("{% for %}"),
        "its chat template does not parse: ",
    ),
    (
        "raises",
        lambda f: (f / TEMPLATE).write_text("{{ raise_exception('no') }}"),
        "rejects messages of the roles user",
    ),
    (
        "divides",
        lambda f: (f / TEMPLATE).write_text("{{ 1 / 0 }}"),
        "roles user: ZeroDivisionError: division by zero",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "problem"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_models_are_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], object], problem: str
) -> None:
    assert isinstance(check_trained_model(section(folder)), Tokenizer)
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        check_trained_model(section(folder))
    assert str(caught.value).startswith(f"model.path: {str(folder)!r} is not allowed; ")
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.gguf", "model.Q8_0.GGUF", "pytorch_model.bin", "model.pt", "config.json"]
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_instead_of_a_folder(tmp_path: Path, name: str, exists: bool) -> None:
    if exists:
        (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError) as caught:
        check_trained_model(section(tmp_path / name))
    kind = Path(name).suffix.lower()
    expected = {
        ".gguf": "a GGUF file is not read; convert it once",
        ".json": "it is a file" if exists else "no such",
    }
    assert expected.get(kind, "the file is a pickle, which could run code") in str(caught.value)


def test_what_is_fine(folder: Path) -> None:
    edit(folder, "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    check_trained_model(section(folder, trust_remote_code=True))
    edit(folder, "config.json", model_type="gemma3_text", auto_map=None)
    add_tokens(folder, "<image>", "<sound>")
    extra = {"audio_token": "<sound>"}
    edit(
        folder,
        "tokenizer_config.json",
        image_token={"content": "<image>"},
        extra_special_tokens=extra,
    )
    check_trained_model(section(folder))  # placeholders of other media than text need no row
    edit(folder, "tokenizer_config.json", pad_token="<|im_end|>")
    check_trained_model(section(folder))  # padding is never read
    edit(folder, "config.json", quantization_config={"quant_method": "gptq"})
    check_trained_model(section(folder), is_trained=False)


def test_without_weights_and_tokenizer_only_the_configuration_is_checked(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "qwen3"})
    assert check_trained_model(section(tmp_path), has_weights=False) is None
    write(tmp_path, "config.json", {"model_type": "qwen99"})
    with pytest.raises(ConfigError, match="qwen99"):
        check_trained_model(section(tmp_path), has_weights=False)


def test_types_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = known_types()
    assert found is not None
    assert set(CONFIG_MAPPING_NAMES) <= found


def test_the_text_of_a_template_replaces_the_name_of_its_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(ModelStyle.__doc__ or "")
    model = section(folder, chat_template=str(file))
    with pytest.raises(
        ConfigError,
        match=r"model\.chat_template: '.*own\.jinja' is not allowed; the file has neither",
    ):
        resolve_model(model)
    file.write_text("{{ raise_exception('no') }}")
    with pytest.raises(
        ConfigError,
        match=r"model\.chat_template: '.*own\.jinja' is not allowed; the template rejects",
    ):
        resolve_model(model)
    file.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    model = resolve_model(model)
    assert model.chat_template == file.read_text()
    file.unlink()
    resolve_model(model)  # as when the run resumes
    for setting, problem in (
        ("nowhere", "No such file or directory; plain, or a file with a Jinja"),
        ("", "Is a dir"),
    ):
        with pytest.raises(ConfigError, match=problem):
            resolve_model(section(folder, chat_template=setting))


def test_plain_serves_a_model_without_template(folder: Path) -> None:
    (folder / TEMPLATE).unlink()
    model = section(folder, chat_template="plain")
    assert resolve_model(model).chat_template == "plain"


def test_sampling_of_the_model_is_noted_if_it_differs(folder: Path) -> None:
    domains = {"d": DomainSection(env="qa")}
    assert sampling_note(section(folder), domains) == ""
    edit(folder, "generation_config.json", do_sample=True, temperature=0.6, top_p=1.0, top_k=20)
    assert sampling_note(section(folder), domains) == (
        f"generation_config.json of {folder} has temperature 0.6, top_k 20; a run samples by domains.<name>.sampling"
    )


def test_checking_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from rlearner_text.model_checks import check_trained_model\n"
        "from rlearner_text.config import ModelSection\n"
        f"check_trained_model(ModelSection(path={str(folder)!r}))\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("engine", ["hf", "vllm", "sglang"])
def test_a_context_longer_than_the_positions_is_refused(folder: Path, engine: str) -> None:
    edit(folder, "config.json", max_position_embeddings=512)
    model = section(folder)
    settings = RunSettings(
        model=model, rollout=RolloutSection(engine=engine, max_context_tokens=513)
    )
    allowed = (
        "rollout.max_context_tokens: 513 is not allowed; at most 512, the positions of the model"
    )
    with pytest.raises(ConfigError, match=allowed):
        rollout_checks.check(settings)
    fitting = RolloutSection(engine=engine, max_context_tokens=512)
    rollout_checks.check(settings.model_copy(update={"rollout": fitting}))
