"""The command ``rlearner data``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from broker.settings.arguments import add_json, count, natural


def add_parser(subparsers: Any) -> None:
    """Add ``data sample``."""
    text = "work on data sets"
    parser = subparsers.add_parser("data", help=text, description=text)
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")
    text = "draw rows of a data set so that each kind of row keeps its share"
    sample = commands.add_parser("sample", help=text, description=text)
    text = "a data set: a file, a folder of files, or owner/name@commit on the Hugging Face hub"
    sample.add_argument("file", metavar="FILE", help=text)
    text = "difficulty (pass rates of a run), or a column; dots lead into nested columns"
    sample.add_argument("--by", required=True, metavar="COLUMN", help=text)
    sample.add_argument("--n", required=True, type=count, metavar="N", help="number of rows")
    text = "a new file, one JSON object per line"
    sample.add_argument("--out", required=True, metavar="FILE", help=text)
    text = "with --by difficulty: a run's folder, or its pass_rates.jsonl"
    sample.add_argument("--pass-rates", metavar="RUN", help=text)
    text = "draw the same number of rows of each kind, where there are enough"
    sample.add_argument("--equal", action="store_true", help=text)
    text = "another number draws other rows (%(default)s)"
    sample.add_argument("--seed", type=natural, default=0, metavar="N", help=text)
    sample.add_argument("--split", default="", help="of a data set that has several")
    sample.add_argument("--subset", default="", help="of a data set that has several")
    add_json(sample)
    sample.set_defaults(run=_sample_rows)


def _sample_rows(options: argparse.Namespace) -> int:
    from rlearner.data.subsets import sample_file

    return sample_file(options)
