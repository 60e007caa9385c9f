"""A model folder of a stranger neither hangs nor kills the process that checks or loads it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from template_models import make_tokenizer_folder

from broker.errors import ConfigError
from broker.settings.host_rules import HostRules
from broker.settings.schema.model import ModelSection
from rlearner_text import model_trial
from rlearner_text.model_trial import try_model
from rlearner_text.tokenizer import Tokenizer, TokenizerError

RANGE = "range(100000)"
TEMPLATES = {
    "nested-ranges": f"{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% for c in {RANGE} %}}"
    "{% endfor %}{% endfor %}{% endfor %}x",
    "nested-texts": "{% set s = 'x' * 30000 %}{% for a in s %}{% for b in s %}{% for c in s %}"
    "{% endfor %}{% endfor %}{% endfor %}x",
    "large-text": "{{ 'a' * 9000000000 }}",
    "large-text-of-a-message": "{{ messages[0]['content'] * 9000000000 }}",
    "large-padding": "{{ 'a'.ljust(9000000000) }}",
    "large-format": "{{ '%9000000000d' % 1 }}",
    "large-list": "{% set s = [1] * 900000000 %}{{ s | length }}",
    "doubling": "{% set n = namespace(s='x') %}{% for a in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "only-with-tools": f"{{% if tools %}}{{% for a in {RANGE} %}}{{% for b in {RANGE} %}}{{% endfor %}}{{% endfor %}}"
    "{% endif %}x",
    "only-later-turns": "{% if messages | length > 8 %}{{ 'a' * 9000000000 }}{% endif %}x",
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_trial, "CPU_S", 3)


def folder_with(tmp_path: Path, template: str) -> Path:
    folder = make_tokenizer_folder(tmp_path / "model", "qwen3")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def panicking(folder: Path) -> None:
    """A regular expression whose search fails, on which the library of tokenizer.json panics or
    raises.
    """
    content = json.loads((folder / "tokenizer.json").read_text())
    pattern = {"Regex": "(?:(?:a|aa|aaa)+)+(?=b)\\G(?<!c)"}
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": pattern,
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize("attack", TEMPLATES)
def test_templates(attack: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATES[attack])
    with pytest.raises(
        ConfigError, match=r"takes more than (20|3) s|takes more than 4 GiB"
    ) as error:
        try_model(folder, "m")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="takes more than"):  # not remembered as one that passed
        try_model(folder, "m")


def test_check_of_a_run(tmp_path: Path) -> None:
    """What an operator types: one line, exit code 2, in bounded memory."""
    folder = folder_with(tmp_path, TEMPLATES["large-text-of-a-message"])
    (folder / "config.json").write_text(
        '{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}'
    )
    (folder / "model.safetensors").write_bytes(bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b"{}")
    command = [
        sys.executable,
        "-m",
        "rlearner.cli",
        "check",
        "configs/quickstart.yaml",
        f"model.path={folder}",
    ]
    done = subprocess.run(
        [*command, "warm_start.steps=0"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30)),
    )
    assert done.returncode == 2, done
    assert done.stderr.startswith(
        f"error: model.path: '{folder}' is not allowed; its tokenizer or its chat template"
    )


@pytest.mark.parametrize(
    "load", [Tokenizer.load, lambda path: Tokenizer.of_run(path, ModelSection())]
)
def test_process_that_joined_tries_first(
    load: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with(tmp_path, TEMPLATES["nested-ranges"])
    load(folder)  # on the owner's machine, where ``check`` has tried it
    monkeypatch.setenv("RL_HOST_RULES", "")
    HostRules().enforce()
    with pytest.raises(ConfigError, match="takes more than"):
        load(folder)


def test_panic_of_the_library_is_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    class Broken:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise PanicException("called `Result::unwrap()` on an `Err` value")

    tokenizer = Tokenizer.load(folder_with(tmp_path, "x"))
    monkeypatch.setattr(tokenizer._backend, "_tokenizer", Broken())
    with pytest.raises(TokenizerError, match=r"the tokenizer aborted: called `Result::unwrap\(\)`"):
        tokenizer.encode("a")


def test_aborting_tokenizer(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "x")
    panicking(folder)
    with pytest.raises(
        ConfigError, match=r"crashes \(exit code 4|tokenizer\.json cannot be read|takes more than"
    ) as error:
        _try_and_load(folder)
    assert "\n" not in str(error.value)


def _try_and_load(folder: Path) -> None:
    try_model(folder, "m")
    Tokenizer.load(folder).encode("a" * 5000)


def test_harmless_model_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tokenizer_folder(tmp_path / "model", "qwen3")
    try_model(folder, "m")
    (passed,) = (tmp_path / "cache" / "rlearner" / "tried_models").iterdir()
    assert passed.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(subprocess, "run", None)  # no process any more
    try_model(folder, "m")
    (folder / "chat_template.jinja").write_text("y")
    with pytest.raises(TypeError):
        try_model(folder, "m")
