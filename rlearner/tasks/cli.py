"""The command ``rlearner tasks``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from broker.settings.arguments import add_json
from rlearner.tasks.build_cli import add_build


def add_parser(subparsers: Any) -> None:
    """Add ``tasks build``, ``tasks try`` and ``tasks swe``."""
    text = "work on terminal tasks in Harbor's format"
    parser = subparsers.add_parser("tasks", help=text, description=text)
    commands = parser.add_subparsers(dest="tasks_command", required=True, metavar="COMMAND")
    add_build(commands)
    _add_try(commands)
    _add_swe(commands)


def _add_try(commands: Any) -> None:
    text = "play each task's solution, which should get reward 1, and nothing, which should not"
    parser = commands.add_parser("try", help=text, description=text)
    text = "task folders, folders of them, or registry files"
    parser.add_argument("paths", nargs="+", metavar="PATH", help=text)
    text = "file system of an image: NAME=host, NAME=FOLDER or NAME=sha256:…; * is any name"
    parser.add_argument("--image", action="append", default=[], metavar="NAME=WHAT", help=text)
    parser.add_argument("--provider", default="namespace", help="of sandboxes (%(default)s)")
    add_json(parser)
    parser.set_defaults(run=_try_tasks)


def _add_swe(commands: Any) -> None:
    text = "make task folders of rows as SWE-bench has them, from local mirrors of repositories"
    parser = commands.add_parser("swe", help=text, description=text)
    parser.add_argument("rows", metavar="ROWS", help="a JSONL file, one row per line")
    text = "folder with a clone of each repository: owner/name or owner__name"
    parser.add_argument("--mirrors", required=True, metavar="FOLDER", help=text)
    text = "new folders of the tasks go here"
    parser.add_argument("--out", required=True, metavar="FOLDER", help=text)
    text = "name of the image with Python and what the repositories need"
    parser.add_argument("--image", required=True, metavar="NAME", help=text)
    add_json(parser)
    parser.set_defaults(run=_write_swe)


def _try_tasks(options: argparse.Namespace) -> int:
    from rlearner.tasks.trials import try_tasks

    return try_tasks(options)


def _write_swe(options: argparse.Namespace) -> int:
    from pathlib import Path

    from broker.system.visible_text import visible_json
    from envhub.tasks.swe import write_swe_tasks

    folders = write_swe_tasks(
        Path(options.rows), Path(options.mirrors), Path(options.out), options.image
    )
    if options.json:
        print(visible_json({"tasks": [str(folder) for folder in folders]}))
    else:
        print(f"wrote {len(folders)} tasks to {options.out}")
    return 0
