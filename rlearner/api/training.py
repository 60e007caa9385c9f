"""Trains a model on rows with reward functions: a first try in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from broker.errors import UserError
from broker.settings.config import UserSettings
from rlearner.api.plain_values import read_dataset
from rlearner.api.reward_functions import Reward
from rlearner.api.run import DATA_FILE, Run
from rlearner_text.rows.columns import Row, column_value
from rlearner_text.rows.reading import read_rows

DOMAIN: Final = "main"
TINY: Final = "tiny"
# Learns a simple reward within a minute on two cores; see configs/quickstart.yaml.
TINY_SETTINGS: Final[Mapping[str, Any]] = {
    "model": {
        "path": None,
        "tiny": {
            "hidden_size": 128,
            "num_layers": 3,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 64,
            "intermediate_size": 384,
            "vocab": "chars",
        },
    },
    "train": {"steps": 20, "groups_per_step": 8, "lr": 1.0e-3, "num_threads": 1},
    "rollout": {"max_running": 64, "max_context_tokens": 256, "num_threads": 1},
}
TINY_DOMAIN: Final[Mapping[str, Any]] = {"max_context_tokens": 256, "sampling": {"max_tokens": 16}}
# Columns by which data sets call them, the first ones are those of ``qa``.
QUESTIONS: Final = ("question", "prompt", "problem")
ANSWERS: Final = ("answer", "ground_truth", "solution", "reward_model.ground_truth")


def train(
    model: str | os.PathLike[str] | Mapping[str, Any],
    dataset: Any,
    reward_funcs: Reward | Iterable[Reward],
    /,
    **settings: Any,
) -> Run:
    """Train a model by reinforcement learning on this machine, and return the finished run.

    Args:
        model: a folder or hub name, ``tiny`` for a small new model, or the section ``model``.
        dataset: rows as a list of mappings, a ``datasets.Dataset`` or a DataFrame, with the columns
            of TRL, verl or ``qa``; or what ``env_args.path`` of ``qa`` takes.
        reward_funcs: as in ``Run``.
        settings: further settings as in ``Run``: ``train={"steps": 100, "lr": 1e-6}``; those of the
            data are ``domains={"main": {...}}``.

    Raises:
        UserError: as in ``Run`` and ``Run.wait``.
    """
    is_tiny = model == TINY
    config: UserSettings = {
        "model": dict(model) if isinstance(model, Mapping) else {"path": os.fspath(model)},
        "samples": {"keep": True},
        **(TINY_SETTINGS if is_tiny else {}),
    }
    rows = None
    if isinstance(dataset, (str, os.PathLike)):
        path = os.fspath(dataset)
        is_here = os.path.exists(path)  # else a name on the hub
        data = {"path": os.path.abspath(path) if is_here else path}
        data |= _find_columns(_first_row(path)) if is_here else {}
    else:
        rows = read_dataset(dataset)
        data = {"path": f"${{here}}/{DATA_FILE}", **_find_columns(rows[0])}
    domain = {"env": "qa", "env_args": data, **(TINY_DOMAIN if is_tiny else {})}
    config["domains"] = {DOMAIN: domain}
    run = Run(config, reward_funcs=reward_funcs, dataset=rows, **settings)
    return run.up().wait()


def _first_row(path: str) -> Row:
    """Return the first row of a data set on disk; empty if ``qa`` is to say why there is none."""
    with suppress(UserError):
        return next((row for _, row in read_rows(path)), {})
    return {}


def _find_columns(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns with question and answer; an empty answer: the rows have none."""
    if not row:
        return {}
    columns = dict(row)
    answers = (name for name in ANSWERS if name in row or column_value(columns, name) is not None)
    return {
        "question": next((name for name in QUESTIONS if name in row), QUESTIONS[0]),
        "answer": next(answers, ""),
    }
