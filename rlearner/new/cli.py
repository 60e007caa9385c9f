"""``rlearner new NAME``. Imports nothing heavy."""

from __future__ import annotations

import argparse
import shlex
import shutil
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

from broker.contract.streams import check_token
from broker.errors import UserError
from broker.settings.arguments import add_json
from broker.system.visible_text import visible_json

# What each kind of project has of its own.
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "game": ("environment.py", "reward.py"),
    "qa": ("questions.jsonl", "reward.py"),
    "tools": ("environment.py", "reward.py"),
    "agent": ("agent.py",),
    "terminal": (),
}
# The kind whose tasks are generated: eight of each sort.
TASKS: Final = "tasks"
# Git would apply a .gitignore to the template itself.
IGNORED: Final = "runs/\n__pycache__/\n.pytest_cache/\n"
# Stands for the project's name in the template, whose files hold braces of their own.
PLACEHOLDER: Final = "@name@"


def add_parser(subparsers: Any) -> None:
    """Add ``new NAME``."""
    text = (
        "make a project folder that runs at once: a configuration, tests, and a game, questions "
        "from a file, functions to call, an agent program or terminal tasks"
    )
    parser = subparsers.add_parser("new", help=text, description=text)
    parser.add_argument("name", metavar="NAME", help="of the new folder: letters, digits, _ and -")
    parser.add_argument(
        "--kind",
        choices=list(KINDS),
        default="game",
        help="a game of several turns, questions and answers from a file, Python functions that "
        "the policy calls, a program that uses OpenAI's protocol, or tasks in a terminal "
        "(%(default)s)",
    )
    add_json(parser)
    parser.set_defaults(run=run_new)


def run_new(options: argparse.Namespace) -> int:
    """Write the folder, print what to do next, and return the exit code.

    Raises:
        UserError: if the name has other characters, or there is such a file or folder.
    """
    name = check_token(options.name, "NAME")
    folder = Path(name)
    try:
        folder.mkdir()
        files = write_project(folder, name, options.kind)
    except FileExistsError:
        raise UserError(
            f"{name}: exists already, and nothing is overwritten; choose another name"
        ) from None
    except OSError as error:
        # mkdir has just created the folder, so it holds nothing of the user.
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{name}: {error.strerror}") from None
    steps = [
        f"cd {shlex.quote(name)}",
        f"rlearner check {name}.yaml",
        "pytest",
        f"rlearner up {name}.yaml",
    ]
    if options.json:
        print(visible_json({"folder": str(folder.absolute()), "files": files, "next": steps}))
    else:
        print(f"wrote {folder}/: {', '.join(files)}\n\nnext:")
        for step in steps:
            print(f"  {step}")
    return 0


def write_project(folder: Path, name: str, kind: str) -> list[str]:
    """Write the files of a project into an empty folder and return their names.

    Raises:
        OSError: if they cannot be written.
    """
    template = resources.files("rlearner.new") / kind
    sources = {f"{name}.yaml": "config.yaml"}
    sources |= {file: file for file in (*KINDS[kind], "test_project.py", "README.md")}
    texts = {
        file: (template / source).read_text(encoding="utf-8").replace(PLACEHOLDER, name)
        for file, source in sources.items()
    }
    texts[".gitignore"] = IGNORED
    for file, text in texts.items():
        # Mode x: a file that exists is never overwritten.
        with (folder / file).open("x", encoding="utf-8") as target:
            target.write(text)
    if kind != "terminal":
        return list(texts)
    from envhub.tasks.generated import write_tasks

    write_tasks(folder / TASKS)
    return [*texts, f"{TASKS}/"]
