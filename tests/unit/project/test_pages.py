"""README, CONTRIBUTING and docs/: every path, command, target, module and setting that a page names
exists. Decisions (docs/adr) stay as they were written.
"""

from __future__ import annotations

import argparse
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import pydantic
import pytest

from broker.cli import parser as broker_parser
from broker.settings import runspec
from broker.settings.run_settings import NAMED_SECTIONS
from envhub.cli import demos_parser, render_parser
from envhub.cli import parser as envhub_parser
from envhub.retriever_cli import retriever_parser
from learner.offline import config as offline
from rewardhub.cli import parser as rewardhub_parser
from rlearner.cli import make_parser
from rollout.cli import parser as rollout_parser

ROOT: Final = Path(__file__).parents[3]
PAGES: Final = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "adr"),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

# What a user writes, a run writes, or a package of others brings.
OTHERS_PATHS: Final = re.compile(r"(my_|runs/|checkpoints/|\./|<|\.venv|/)|.*(/my_|\*|…|<|NAME)")
# Files that a page tells its reader to write, or a command writes.
OTHERS_FILES: Final = frozenset(
    {"file.py", "factor.py", "mine.py", "plan.yaml", "lake.yaml", "digits.yaml", "start.yaml"}
)
MISSPELLED: Final = frozenset({"train.stepz"})  # a tutorial shows what becomes of it
SIGNED_TEXT: Final = "rlearner statement"  # begins what an owner signs; no command

WRITTEN_AT_THE_ROOT: Final = frozenset({"runs", "site", "dist", "build", "bundle", "models"})

SPAN: Final = re.compile(r"`([^`]+)`")
# fenced, or indented behind an empty line that no item of a list precedes
BLOCK: Final = re.compile(r"^```.*?^```|(?<=\n\n)(?: {4,}\S[^\n]*\n+)+", re.MULTILINE | re.DOTALL)
PATH: Final = re.compile(r"[\w.<>*…/+-]+\.(?:py|md|yaml|yml|toml|sh|txt|json|jsonl|c|png)\b")
# what else has a dot in it: files named by a process, tensors of a model
FILE_ENDINGS: Final = re.compile(
    r".*\.(py|yaml|jsonl?|log|url|keys|creds|token|gguf|safetensors|weight)"
)
SETTING: Final = re.compile(r"[a-z_]+(?:\.(?:[a-z_]+|<name>|NAME|\*))+")


def code_spans(text: str) -> list[str]:
    """Return what stands in backticks in a page's prose and tables."""
    return [" ".join(span.split()) for span in SPAN.findall(BLOCK.sub("", text))]


def code_lines(text: str) -> list[str]:
    """Return the lines of a page's blocks of code, without comments, joined where they continue."""
    blocks = "\n".join(block.replace("\\\n", " ") for block in BLOCK.findall(text))
    return [re.split(r"\s#\s|\s{2,}#", line)[0].strip() for line in blocks.splitlines()]


@cache
def source_files() -> frozenset[str]:
    """Return every file of this tree but those that tools, runs and builds write."""
    files = []
    for folder, folders, names in os.walk(ROOT):
        written = WRITTEN_AT_THE_ROOT if folder == str(ROOT) else frozenset({"__pycache__"})
        folders[:] = [name for name in folders if name not in written and name[0] != "."]
        files += [os.path.relpath(os.path.join(folder, name), ROOT) for name in names]
    return frozenset(files)


@cache
def path_ends() -> frozenset[str]:
    """Return every path, and every end of it that begins at a folder or is the file."""
    parts = [path.split("/") for path in source_files()]
    return frozenset("/".join(names[start:]) for names in parts for start in range(len(names)))


def missing_paths(text: str) -> list[str]:
    """Return the paths of Python and YAML files that a page names and nobody has."""
    code = [*code_spans(text), *code_lines(text)]
    named = [path for span in code for path in PATH.findall(span)]
    return [
        path
        for path in named
        if path.endswith((".py", ".yaml", ".c"))
        and not OTHERS_PATHS.match(path)
        and path.rpartition("/")[2] not in OTHERS_FILES
        and path not in path_ends()
    ]


@each_page
def test_paths_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    own = set(re.findall(r"`([\w.]+)`:\n", text))  # files whose text follows
    assert [path for path in missing_paths(text) if path not in own] == []


@pytest.mark.parametrize("page", PAGES[:2], ids=lambda page: page.name)
def test_links_of_the_root_pages_exist(page: Path) -> None:
    """MkDocs checks those of docs/."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


PARSERS: Final[Mapping[str, Callable[[], argparse.ArgumentParser]]] = {
    "rlearner": make_parser,
    "broker": broker_parser,
    "rollout-server": rollout_parser,
    "envhub": envhub_parser,
    "envhub demos": demos_parser,
    "envhub render": render_parser,
    "envhub retriever": retriever_parser,
    "rewardhub": rewardhub_parser,
}


@cache
def program(name: str) -> argparse.ArgumentParser:
    return PARSERS[name]()


def command_faults(line: str) -> list[str]:
    """Return the words of a command line that its program does not know."""
    words = line.split()
    while words and ("=" in words[0] or words[0] in {"sudo", "nohup", "exec"}):
        words = words[1:]
    if (
        not words
        or line.startswith(SIGNED_TEXT)
        or (name := words[0].rpartition("/")[2]) not in PARSERS
    ):
        return []
    rest = words[1:]
    if rest and f"{name} {rest[0]}" in PARSERS:
        name, rest = f"{name} {rest[0]}", rest[1:]
    parser = program(name)
    while rest and (choices := subcommands(parser)):
        if not re.fullmatch(r"[a-z][a-z-]+", rest[0]):
            return []  # `rlearner …`, `broker --help`
        if rest[0] not in choices:
            return [f"{name} {rest[0]}"]
        parser, rest = choices[rest[0]], rest[1:]
    options = {option for action in parser._actions for option in action.option_strings}
    given = [word.partition("=")[0] for word in rest if re.match(r"--[a-z]", word)]
    return [f"{parser.prog} {option}" for option in given if option not in options]


def command_lines(text: str) -> Iterator[str]:
    """Return the calls of programs in a page's code."""
    for line in [*code_lines(text), *code_spans(text)]:
        yield from re.split(r"\s*(?:[;|&]+|\$\(|\))\s*", line)


@each_page
def test_commands_on_a_page_parse(page: Path) -> None:
    lines = command_lines(page.read_text(encoding="utf-8"))
    assert [fault for line in lines for fault in command_faults(line)] == []


@each_page
def test_make_targets_and_modules_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join([*code_lines(text), *code_spans(text)])
    makefiles = [path for path in source_files() if path.endswith(("Makefile", ".mk"))]
    rules = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in makefiles)
    targets = set(re.findall(r"^([a-z][\w-]*):", rules, re.MULTILINE))
    assert set(re.findall(r"^make ([a-z][\w-]*)", code, re.MULTILINE)) - targets == set()
    modules = re.findall(
        r"python -m ((?:bench|tools|broker|examples|requirements)\.\w[\w.]*\w)", code
    )
    paths = [module.replace(".", "/") for module in modules]
    ends = path_ends()
    assert [
        p for p in paths if not {f"{p}.py", f"{p}/__main__.py", f"{p}/__init__.py"} & ends
    ] == []


def load_target(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


@cache
def known_sections() -> dict[str, list[Any]]:
    """Return the models of each section, those of offline training included."""
    sections: dict[str, list[Any]] = {}
    for table in (runspec.SECTIONS, *offline.SECTIONS.values()):
        for name, target in table.items():
            sections.setdefault(name, []).append(load_target(target))
    return sections


def models_in(annotation: Any) -> list[Any]:
    """Return the models of an annotation; ``dict`` or ``list`` where its keys are free."""
    origin = typing.get_origin(annotation)
    if origin in (dict, list) or annotation in (dict, list):
        return [dict]
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [model for part in typing.get_args(annotation) for model in models_in(part)]
    is_model = isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
    return [annotation] if is_model else []


def is_setting(path: Iterable[str], model: Any) -> bool:
    names = list(path)
    if not names or names == ["*"] or model is dict:
        return True
    if (field := model.model_fields.get(names[0])) is None:
        return False
    return len(names) == 1 or any(
        is_setting(names[1:], inner) for inner in models_in(field.annotation)
    )


def is_known_name(name: str) -> bool:
    """Return whether a dotted name is a setting, or a module or attribute of this tree."""
    first, *rest = name.split(".")
    keys = rest[1:] if first in NAMED_SECTIONS else rest
    if any(is_setting(keys, model) for model in known_sections()[first]):
        return True
    folders = ["/".join([first, *rest[:end]]) for end in range(1, len(rest) + 1)]
    return any({f"{folder}.py", f"{folder}/__init__.py"} & source_files() for folder in folders)


def unknown_settings(text: str) -> list[str]:
    """Return the dotted names of a page's code that begin as a setting does and are none."""
    names = {
        match[0]
        for span in [*code_spans(text), *code_lines(text)]
        for match in SETTING.finditer(span)
        if match[0].split(".")[0] in known_sections()
        and not re.match(r"[\w./@-]", span[match.start() - 1 : match.start()])
        and not re.match(r"\w*[(/@]|:\w", span[match.end() :])
    }
    return sorted(
        name for name in names if not FILE_ENDINGS.fullmatch(name) and not is_known_name(name)
    )


@each_page
def test_settings_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming-from.md":  # the first column has the words of other projects
        text = re.sub(r"^\|[^\n]*? \| ", "| ", text, flags=re.MULTILINE)
    if page.name == "README.md":
        text = re.sub(r"^\| \[[^\n]*", "", text, flags=re.MULTILINE)
    assert set(unknown_settings(text)) <= MISSPELLED


def test_faults_on_a_page_are_found() -> None:
    text = (
        "Set `train.learning` or `domains.<name>.group_sizes`, see `learner/gone.py`, not\n"
        "`train.lr`, `rollout.engine_args.tensor_parallel` and `learner/loop.py`:\n\n"
        "    rlearner up configs/gone.yaml train.stepz=3 --jump    # a comment\n"
        "    RL_RUN=quick rlearner fly\n"
    )
    assert unknown_settings(text) == ["domains.<name>.group_sizes", "train.learning", "train.stepz"]
    assert missing_paths(text) == ["learner/gone.py", "configs/gone.yaml"]
    faults = [fault for line in command_lines(text) for fault in command_faults(line)]
    assert faults == ["rlearner up --jump", "rlearner fly"]
